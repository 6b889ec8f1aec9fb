"""What one iteration of the engine is to compute: items of a plan that were found valid. No decisions."""

from dataclasses import dataclass

import msgspec

from services.worker.core.plans import QueuedPlan
from services.worker.core.sequence import HeldSequence
from shared.messages.plans import PrefixHit, ShortStart, SkippedItem


class WorkItem(msgspec.Struct, frozen=True, gc=False):
    """Compute tokens [first_token, end_token) of a sequence; `samples` when that is the last it has."""

    sequence: HeldSequence
    first_token: int
    end_token: int
    samples: bool
    is_decode: bool


@dataclass(frozen=True, slots=True)
class StepWork:
    """One iteration of the engine: what to compute, for which plan."""

    queued: QueuedPlan
    items: tuple[WorkItem, ...]
    skipped: tuple[SkippedItem, ...]
    ended: tuple[HeldSequence, ...]
    """Ended since the last report, before this iteration."""
    hits: tuple[PrefixHit, ...] = ()
    shorts: tuple[ShortStart, ...] = ()

    @property
    def prefilled_tokens(self) -> int:
        return sum(item.end_token - item.first_token for item in self.items if not item.is_decode)

    @property
    def decoded_tokens(self) -> int:
        return sum(item.is_decode for item in self.items)
