"""How far a policy's tasks are, as it projects them. Shared by policies; knows none of their rules."""

from dataclasses import dataclass
from enum import StrEnum

from services.scheduler.policy.contract import Task
from shared.messages.sequence import SequenceKey


class Stage(StrEnum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    COMPLETE = "complete"
    """Planned to its limit: keeps its blocks until the end is confirmed."""


@dataclass(slots=True, eq=False)
class Entry:
    """One task's projected progress."""

    task: Task
    generated_tokens: int
    stage: Stage = Stage.WAITING
    computed_tokens: int = 0
    allocated_blocks: int = 0

    @property
    def prefill_tokens(self) -> int:
        return self.task.prompt_tokens + self.generated_tokens

    @property
    def missing_tokens(self) -> int:
        return self.task.max_tokens - self.generated_tokens


def order_of(entry: Entry) -> tuple[float, SequenceKey]:
    """First come, first served."""
    return entry.task.order
