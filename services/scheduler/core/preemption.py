"""What becomes of the KV of a sequence that a policy preempts: kept on the host, or computed again. Pure.

Two rungs of the ladder (`policy/relief.py`), weighed at the moment of the preemption, for the victim that the
policy chose, by what its worker measured. Where the ladder is off everything is computed again.
"""

from collections import Counter
from dataclasses import dataclass, field

from services.scheduler.core.rules import ReliefRules
from services.scheduler.policy.contract import PlannedPreemption
from services.scheduler.policy.relief import (
    LADDER,
    MemoryPressure,
    Relief,
    ReliefSpeeds,
    Rung,
    Victim,
    next_relief,
)
from shared.messages.plans import PreemptMode
from shared.messages.reports import WorkerReported

_OTHERS = frozenset(LADDER) - {Rung.SWAP, Rung.RECOMPUTE}


def speeds_of(report: WorkerReported) -> ReliefSpeeds:
    """As the worker measured them; what it did not is 0."""
    return ReliefSpeeds(
        prefill_tokens_per_s=report.prefill_tokens_per_s,
        decode_step_s=report.decode_step_s,
        host_blocks_per_s=1.0 / report.host_block_s if report.host_block_s > 0 else 0.0,
        remote_attention_s=report.remote_block_s,
        stall_s=report.expand_stall_s or 0.0,
    )


@dataclass(slots=True)
class Preempting:
    """Of one worker. `counts`: how often, by what became of the KV."""

    counts: Counter[PreemptMode] = field(default_factory=Counter)
    _swapped_blocks: int = 0
    """Since the last heartbeat: what that says of the host is before them."""

    def decide(
        self, report: WorkerReported, item: PlannedPreemption, rules: ReliefRules
    ) -> tuple[PreemptMode, Relief | None]:
        """See `weigh`; `report` is the worker's latest."""
        mode, relief = weigh(report, item, report.swap_room_blocks - self._swapped_blocks, rules)
        self.counts[mode] += 1
        self._swapped_blocks += item.held_blocks if mode is PreemptMode.SWAP else 0
        return mode, relief

    def on_heartbeat(self) -> None:
        self._swapped_blocks = 0


def weigh(
    report: WorkerReported, item: PlannedPreemption, room_blocks: int, rules: ReliefRules
) -> tuple[PreemptMode, Relief | None]:
    """How `item` gives up its blocks, and why; None where nothing was weighed. `room_blocks`: the host keeps
    so many more."""
    if not rules.enabled or item.held_blocks < 1:
        return PreemptMode.RECOMPUTE, None
    whole_blocks = item.computed_tokens // report.block_tokens
    pressure = MemoryPressure(
        needed_blocks=item.held_blocks,
        block_tokens=report.block_tokens,
        running=1,
        horizon_steps=0,
        speeds=speeds_of(report),
        host_tier_blocks=room_blocks if whole_blocks else 0,
        victim=Victim(blocks=item.held_blocks, tokens=item.computed_tokens, remaining_tokens=0),
    )
    relief = next_relief(pressure, rules.switched_off | _OTHERS)
    is_swap = relief.chosen is not None and relief.chosen.rung is Rung.SWAP
    return PreemptMode.SWAP if is_swap else PreemptMode.RECOMPUTE, relief
