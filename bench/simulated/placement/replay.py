"""Replay jobs under a packing policy, epoch by epoch, and count GPUs, moves and memory in use.

Simulated: a request decodes at the hardware's speed from arrival to end, and moves take no time.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.simulated.placement.jobs import BLOCK_TOKENS, Hardware, Job
from services.placement.policy import create_packing
from services.placement.policy.contract import Action, Operation, PackingEffects, PackingPolicy
from services.placement.policy.dispatch import LoadBalance
from services.placement.policy.mell.cluster import lower_bound


@dataclass
class Tally:
    """Counts of one replay."""

    epochs: int = 0
    gpu_epochs: int = 0
    used_share: float = 0.0
    """Sum over epochs of blocks in use / blocks of active GPUs."""
    volume: float = 0.0
    """Sum over epochs of blocks in use / capacity of a GPU."""
    least_gpus: int = 0
    """Sum over epochs of the volume bound: ceil(volume)."""
    worst_ratio: float = 0.0
    """Greatest over epochs of (GPUs - 6) / design §3's lower bound."""
    peak_gpus: int = 0
    moves: int = 0
    item_moves: int = 0
    recomputes: int = 0
    moves_max: int = 0
    """Most moves of one operation, bundles counted once; only in replays by operation."""
    requests_max: int = 0
    """The same with every request counted."""
    waits: int = 0
    seconds: float = 0.0
    timeline: list[tuple[float, int]] = field(default_factory=list)

    def mean_gpus(self) -> float:
        return self.gpu_epochs / self.epochs

    def note(self, effects: PackingEffects, operations: int) -> None:
        self.moves += len(effects.moves)
        self.item_moves += effects.item_moves
        self.recomputes += effects.recomputes
        self.waits += len(effects.waiting) + len(effects.displaced)
        if operations == 1:
            self.moves_max = max(self.moves_max, effects.item_moves)
            self.requests_max = max(self.requests_max, len(effects.moves))


class Replay:
    """A replay with epochs of `epoch_s`. `by_operation` disables batching; `reserves` allocates a
    request's greatest length at arrival."""

    def __init__(
        self, hardware: Hardware, *, epoch_s: float = 1.0, by_operation: bool = False, reserves: bool = False
    ) -> None:
        self._hardware = hardware
        self._epoch_s = epoch_s
        self._by_operation = by_operation
        self._reserves = reserves

    def run(self, policy: PackingPolicy, jobs: Sequence[Job], warm_up_s: float) -> Tally:
        """Run from the first arrival to the last; counting starts after `warm_up_s`."""
        tally = Tally()
        arrivals = deque(sorted(jobs, key=lambda job: (job.arrival_s, job.index)))
        live: dict[int, tuple[Job, int]] = {}
        ends: list[tuple[float, int]] = []
        now_s, last_s = 0.0, arrivals[-1].arrival_s
        while now_s < last_s:
            now_s += self._epoch_s
            operations = self._operations(now_s, arrivals, live, ends)
            if self._by_operation:
                for one in operations:
                    self._take_in(policy, [one], tally, live, now_s > warm_up_s)
            else:
                self._take_in(policy, operations, tally, live, now_s > warm_up_s)
            if now_s > warm_up_s:
                self._measure(policy, live, tally, now_s)
        return tally

    def _operations(
        self,
        now_s: float,
        arrivals: deque[Job],
        live: dict[int, tuple[Job, int]],
        ends: list[tuple[float, int]],
    ) -> list[Operation]:
        """Return the operations since the last epoch, ends first."""
        speed = self._hardware.tokens_per_s
        found = []
        while ends and ends[0][0] <= now_s:
            _, index = heapq.heappop(ends)
            if index in live:
                del live[index]
                found.append(Operation(Action.END, index))
        for index, (job, blocks) in live.items():
            grown = blocks if self._reserves else job.blocks_at(now_s - job.arrival_s, speed)
            if grown != blocks:
                live[index] = (job, grown)
                found.append(Operation(Action.GROW, index, grown))
        while arrivals and arrivals[0].arrival_s <= now_s:
            job = arrivals.popleft()
            blocks = job.blocks_at(now_s - job.arrival_s, speed)
            if self._reserves:
                blocks = min(self._hardware.capacity_blocks, -(-job.most_tokens // BLOCK_TOKENS))
            live[job.index] = (job, blocks)
            heapq.heappush(ends, (job.arrival_s + job.runs_s(speed), job.index))
            found.append(Operation(Action.ALLOCATE, job.index, blocks))
        return found

    def _take_in(
        self,
        policy: PackingPolicy,
        operations: list[Operation],
        tally: Tally,
        live: dict[int, tuple[Job, int]],
        is_counted: bool,
    ) -> None:
        effects = policy.apply(operations)
        for lost in (*effects.waiting, *effects.displaced):
            assert isinstance(lost, int)
            live.pop(lost, None)
        if is_counted:
            tally.note(effects, len(operations))

    def _measure(
        self, policy: PackingPolicy, live: dict[int, tuple[Job, int]], tally: Tally, now_s: float
    ) -> None:
        capacity = self._hardware.capacity_blocks
        sizes = [blocks for _, blocks in live.values()]
        if self._reserves:
            speed = self._hardware.tokens_per_s
            sizes = [job.blocks_at(now_s - job.arrival_s, speed) for job, _ in live.values()]
        used, gpus = sum(sizes), policy.active_workers
        tally.epochs += 1
        tally.seconds += self._epoch_s
        tally.gpu_epochs += gpus
        tally.peak_gpus = max(tally.peak_gpus, gpus)
        tally.volume += used / capacity
        tally.least_gpus += -(-used // capacity)
        tally.used_share += used / (gpus * capacity) if gpus else 0.0
        tally.worst_ratio = max(tally.worst_ratio, (gpus - 6) / max(1, lower_bound(sizes, capacity)))
        tally.timeline.append((now_s, gpus))


WORKERS = 2000
"""Available workers, more than any run needs."""
LAZY_RELIEF_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class PackingSide:
    """One row. With `reserves`, a baseline allocates the greatest length at arrival and never grows it."""

    label: str
    policy: str
    reserves: bool = False
    by_operation: bool = False
    relief_share: float | None = None
    """Load balancing relieves only workers with less free memory per request than this."""

    def make(self, capacity_blocks: int) -> PackingPolicy:
        if self.relief_share is not None:
            return LoadBalance(capacity_blocks, relief_share=self.relief_share)
        return create_packing(self.policy, capacity_blocks)

    def run(self, jobs: list[Job], hardware: Hardware, warm_up_s: float) -> Tally:
        policy = self.make(hardware.capacity_blocks)
        for index in range(WORKERS):
            policy.add_worker(f"w{index:05d}")
        replay = Replay(hardware, by_operation=self.by_operation, reserves=self.reserves)
        return replay.run(policy, jobs, warm_up_s)


MELL = PackingSide("mell", "mell")
MELL_BY_OPERATION = PackingSide("mell, not batched", "mell", by_operation=True)
EAGER_SIDE = PackingSide("mell eager", "mell_eager")
EAGER_BY_OPERATION = PackingSide("mell eager, not batched", "mell_eager", by_operation=True)
BEST_FIT = PackingSide("best_fit", "best_fit")
WORST_FIT = PackingSide("worst_fit", "worst_fit")
BALANCE = PackingSide("load_balance", "load_balance")
BALANCE_LAZY = PackingSide("load_balance, lazy", "load_balance", relief_share=LAZY_RELIEF_SHARE)
BEST_FIT_RESERVE = PackingSide("best_fit, reserve", "best_fit", reserves=True)
WORST_FIT_RESERVE = PackingSide("worst_fit, reserve", "worst_fit", reserves=True)

SIDES = (
    MELL, MELL_BY_OPERATION, EAGER_SIDE, EAGER_BY_OPERATION, BEST_FIT, BEST_FIT_RESERVE, WORST_FIT,
    WORST_FIT_RESERVE, BALANCE, BALANCE_LAZY,
)  # fmt: skip


WITHOUT = ("best_fit", "worst_fit")
WITH = ("mell", "load_balance")
LOADS = (0.9, 1.0, 1.2, 1.5)
"""Mean need of the load over the capacity of the GPUs."""


@dataclass(frozen=True, slots=True)
class ServedShare:
    """Requests that keep their KV under one policy at one load."""

    policy: str
    load: float
    gpus: int
    requests: int
    served: int

    @property
    def ratio(self) -> float:
        return self.served / self.requests


class _Keeping(Replay):
    """Counts each request that loses its KV once, and removes it."""

    def __init__(self, hardware: Hardware, *, migrates: bool) -> None:
        super().__init__(hardware)
        self.lost: set[int] = set()
        self._migrates = migrates

    def _take_in(
        self,
        policy: PackingPolicy,
        operations: list[Operation],
        tally: object,
        live: dict[int, tuple[Job, int]],
        is_counted: bool,
    ) -> None:
        effects = policy.apply([one for one in operations if one.request not in self.lost])
        lost = {*effects.waiting, *effects.displaced}
        if not self._migrates:
            moved = {move.request for move in effects.moves}
            for request in moved - lost:
                policy.end(request)
            lost |= moved
        for request in lost:
            assert isinstance(request, int)
            self.lost.add(request)
            live.pop(request, None)


def measure(jobs: Sequence[Job], hardware: Hardware, mean_gpus: float) -> list[ServedShare]:
    """Measure every policy at every load; `mean_gpus` is the jobs' mean need by volume."""
    found = []
    for load in LOADS:
        gpus = max(1, round(mean_gpus / load))
        for name in (*WITHOUT, *WITH):
            policy = create_packing(name, hardware.capacity_blocks)
            for index in range(gpus):
                policy.add_worker(f"w{index:03d}")
            replay = _Keeping(hardware, migrates=name in WITH)
            replay.run(policy, jobs, 0.0)
            found.append(ServedShare(name, load, gpus, len(jobs), len(jobs) - len(replay.lost)))
    return found


def figures(found: Sequence[ServedShare]) -> dict[str, float]:
    """Return shares served, and `gain`: requests served by MELL over the better policy without migration."""
    made: dict[str, float] = {}
    for load in sorted({one.load for one in found}):
        served = {one.policy: one for one in found if one.load == load}
        rival = max((served[name] for name in WITHOUT), key=lambda one: one.served)
        made[f"served_mell_{load:g}"] = served["mell"].ratio
        made[f"served_without_{load:g}"] = rival.ratio
        if rival.served:
            made[f"served_gain_{load:g}"] = served["mell"].served / rival.served
    return made
