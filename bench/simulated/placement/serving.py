"""Figure 6 of papers/000: on a fixed number of GPUs, how many keep their KV, with migration and without.

The serving ratio is the share of requests whose KV stays in GPU memory from arrival to end. Without migration
(best fit, worst fit) a request is turned away when no GPU has room for its prompt, and the youngest on a GPU
loses its KV when the GPU overflows. With migration (MELL, load balancing) it moves if it can. Who loses KV is
not tried again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.simulated.placement.jobs import Hardware, Job
from bench.simulated.placement.replay import Replay
from services.placement.policy import create_packing
from services.placement.policy.contract import Operation, PackingPolicy

WITHOUT = ("best_fit", "worst_fit")
WITH = ("mell", "load_balance")
LOADS = (0.9, 1.0, 1.2, 1.5)
"""Mean need of the load, in blocks, over what the GPUs have."""


@dataclass(frozen=True, slots=True)
class ServedShare:
    """Of one policy at one load."""

    policy: str
    load: float
    gpus: int
    requests: int
    served: int

    @property
    def ratio(self) -> float:
        return self.served / self.requests


class _Keeping(Replay):
    """Counts who loses KV, once, and lets go of them."""

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
            for request in moved:
                policy.end(request)
            lost |= moved
        for request in lost:
            assert isinstance(request, int)
            self.lost.add(request)
            live.pop(request, None)


def measure(jobs: Sequence[Job], hardware: Hardware, mean_gpus: float) -> list[ServedShare]:
    """Every policy at every load; `mean_gpus` is what the jobs need on average, by volume."""
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
    """`gain`: how many times as many keep their KV under MELL as under the better one without migration."""
    made: dict[str, float] = {}
    for load in sorted({one.load for one in found}):
        served = {one.policy: one for one in found if one.load == load}
        rival = max((served[name] for name in WITHOUT), key=lambda one: one.served)
        made[f"served_mell_{load:g}"] = served["mell"].ratio
        made[f"served_without_{load:g}"] = rival.ratio
        if rival.served:
            made[f"served_gain_{load:g}"] = served["mell"].served / rival.served
    return made
