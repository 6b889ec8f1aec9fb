"""Timeline of tokens computed layer by layer while the paper's swap controller moves layers.

Time is in whole ticks, so events can coincide exactly. At one tick a layer's end comes first, then completed
transfers, then the next layer's start. Source: papers/004 figure 4.
"""

from dataclasses import dataclass, field

from services.worker.pie.core.meter import Direction
from sim.pie.swap import SwapController, SwapTransfer


@dataclass(frozen=True, slots=True)
class Pace:
    """Ticks to compute one layer, copy it in and copy it out."""

    compute: int
    swap_in: int
    swap_out: int


@dataclass(slots=True)
class Timeline:
    """Runs tokens one after the other; `stalls` has the ticks that each token waited for KV."""

    controller: SwapController
    pace: Pace
    now: int = 0
    stalls: list[int] = field(default_factory=list)
    fifo_ticks: list[int] = field(default_factory=list)
    """Ticks from the start of the swap-out to the end of the swap-in, per completed swap."""
    _due: dict[Direction, tuple[int, SwapTransfer]] = field(default_factory=dict)
    _left: dict[int, int] = field(default_factory=dict)

    def run(self, tokens: int) -> None:
        for _ in range(tokens):
            self.stalls.append(sum(self._layer(layer) for layer in range(self.controller.table.layers)))

    def _layer(self, layer: int) -> int:
        """Run one layer and return its stall in ticks."""
        controller, began = self.controller, self.now
        self._submit(controller.on_awaited(layer, self.now))
        while not controller.table.is_present(layer):
            self._complete_until(min(due for due, _ in self._due.values()))
        controller.on_started(layer)
        controller.check_integrity()
        stalled = self.now - began
        end = self.now + self.pace.compute
        while self._due and min(due for due, _ in self._due.values()) < end:
            self._complete_until(min(due for due, _ in self._due.values()))
        self.now = end
        self._submit(controller.on_ended(layer, self.now))
        self._complete_until(self.now)
        return stalled

    def _complete_until(self, now: int) -> None:
        self.now = now
        for direction in (Direction.OUT, Direction.IN):
            due, transfer = self._due.get(direction, (now + 1, None))
            if transfer is None or due > now:
                continue
            del self._due[direction]
            if direction is Direction.IN and transfer.layer in self._left:
                self.fifo_ticks.append(now - self._left.pop(transfer.layer))
            self._submit(self.controller.on_completed(transfer, now))

    def _submit(self, transfers: list[SwapTransfer]) -> None:
        for transfer in transfers:
            is_in = transfer.direction is Direction.IN
            self._due[transfer.direction] = (
                self.now + (self.pace.swap_in if is_in else self.pace.swap_out),
                transfer,
            )
            if not is_in:
                self._left[transfer.layer] = self.now


@dataclass(frozen=True, slots=True)
class Steady:
    """Steady state of one token."""

    stall_share: float
    """Share of the computation time."""
    early_share: float
    """Share of swap-ins that are for the next token."""
    swap_ins: float


def settle(layers: int, fifo_layers: int, pace: Pace, *, warm_tokens: int = 6, tokens: int = 12) -> Steady:
    """Return means per token after `warm_tokens`."""
    timeline = Timeline(SwapController(layers, fifo_layers), pace)
    timeline.run(warm_tokens)
    before_ins, before_early = timeline.controller.swap_ins, timeline.controller.early_swap_ins
    timeline.run(tokens)
    swap_ins = timeline.controller.swap_ins - before_ins
    early = timeline.controller.early_swap_ins - before_early
    stalled = sum(timeline.stalls[warm_tokens:])
    return Steady(stalled / (tokens * layers * pace.compute), early / max(1, swap_ins), swap_ins / tokens)
