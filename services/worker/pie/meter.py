"""What Pie's swapping costs: waits per layer, bytes and times of copies, windows for the expansion
controller. Pure.
"""

from services.worker.pie.expansion import Window
from services.worker.pie.swap import Direction, SwapController


class SwapMeter:
    """Sums since the start, and since the last window."""

    def __init__(self, layers: int) -> None:
        self.stall_s = [0.0] * layers
        """By layer: how long its computation waited for its KV."""
        self.stalls = [0] * layers
        self.compute_s = 0.0
        """Of all steps, without the waits."""
        self.moved_bytes = dict.fromkeys(Direction, 0)
        self.resize_s = 0.0
        """In which slots changed size and nothing was computed."""
        self.iterations = 0
        self._swap_s: dict[Direction, list[float]] = {direction: [] for direction in Direction}
        self._used_blocks = 0
        self._tokens = 0
        self._work_blocks, self._work_s = 0, 0.0
        self._began_s: float | None = None
        self._before = (0.0, 0.0, 0, 0)

    @property
    def stall_share(self) -> float:
        """Waiting over computing, since the start."""
        return sum(self.stall_s) / self.compute_s if self.compute_s else 0.0

    def on_stall(self, layer: int, waited_s: float) -> None:
        self.stall_s[layer] += waited_s
        self.stalls[layer] += 1

    def on_copied(self, direction: Direction, sent_bytes: int, took_s: float) -> None:
        self.moved_bytes[direction] += sent_bytes
        self._swap_s[direction].append(took_s)

    def on_step(
        self, tokens: int, compute_s: float, stall_s: float, used_blocks: int, *, is_decoding: bool
    ) -> None:
        """One iteration; `is_decoding`: no prompt is in it."""
        self.iterations += 1
        if is_decoding:
            self._work_blocks += used_blocks
            self._work_s += compute_s + stall_s
        self.compute_s += compute_s
        self._tokens += tokens
        self._used_blocks = max(self._used_blocks, used_blocks)

    def close_window(
        self, iterations: int, controller: SwapController, capacity_blocks: int, now_s: float
    ) -> Window:
        """What was since the last call."""
        stall_s, compute_s, ins, early = self._before
        self._before = (sum(self.stall_s), self.compute_s, controller.swap_ins, controller.early_swap_ins)
        began_s, self._began_s = self._began_s, now_s
        window = Window(
            iterations=iterations,
            tokens=self._tokens,
            elapsed_s=self._before[0] - stall_s + self._before[1] - compute_s
            if began_s is None
            else now_s - began_s,
            compute_s=self._before[1] - compute_s,
            stall_s=self._before[0] - stall_s,
            swap_ins=self._before[2] - ins,
            early_swap_ins=self._before[3] - early,
            used_blocks=self._used_blocks,
            capacity_blocks=capacity_blocks,
            swap_s=max(_mean(times) for times in self._swap_s.values()),
            work_blocks=self._work_blocks,
            work_s=self._work_s,
        )
        self._work_blocks, self._work_s = 0, 0.0
        self._tokens = self._used_blocks = 0
        for times in self._swap_s.values():
            times.clear()
        return window


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
