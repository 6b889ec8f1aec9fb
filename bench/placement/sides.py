"""What is compared: policies, and how each is run."""

from dataclasses import dataclass

from bench.placement.jobs import Hardware, Job
from bench.placement.replay import Replay, Tally
from services.placement.policy import create_packing
from services.placement.policy.load_balance import LoadBalance
from services.placement.policy.packing import PackingPolicy

WORKERS = 2000
"""That could be activated: more than any run needs."""
LAZY_RELIEF_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Side:
    """One row. `reserves`: the other reading of a baseline, greatest length at arrival, no growth."""

    label: str
    policy: str
    reserves: bool = False
    by_operation: bool = False
    relief_share: float | None = None
    """Of load balancing that leaves workers with more free memory per request alone."""

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


MELL = Side("mell", "mell")
MELL_BY_OPERATION = Side("mell, not batched", "mell", by_operation=True)
EAGER_SIDE = Side("mell eager", "mell_eager")
EAGER_BY_OPERATION = Side("mell eager, not batched", "mell_eager", by_operation=True)
BEST_FIT = Side("best_fit", "best_fit")
WORST_FIT = Side("worst_fit", "worst_fit")
BALANCE = Side("load_balance", "load_balance")
BALANCE_LAZY = Side("load_balance, lazy", "load_balance", relief_share=LAZY_RELIEF_SHARE)
BEST_FIT_RESERVE = Side("best_fit, reserve", "best_fit", reserves=True)
WORST_FIT_RESERVE = Side("worst_fit, reserve", "worst_fit", reserves=True)

SIDES = (
    MELL,
    MELL_BY_OPERATION,
    EAGER_SIDE,
    EAGER_BY_OPERATION,
    BEST_FIT,
    BEST_FIT_RESERVE,
    WORST_FIT,
    WORST_FIT_RESERVE,
    BALANCE,
    BALANCE_LAZY,
)
