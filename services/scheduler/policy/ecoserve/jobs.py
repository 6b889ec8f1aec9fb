"""One sequence as the EcoServe family sees it: where it stands, what it holds, what is set aside for it.

Blocks are counted three ways. `held` are there physically. `own` are set aside for it alone: never less than
held, less what is hosted. `hosted` are lent to it out of its host's own. So the worker's capacity bounds
the sum of `own`, and with that, as no slot is used by two at once, the sum of `held`.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Any

from services.scheduler.policy.contract import Task
from shared.messages.commands import LengthPrediction


class JobStage(StrEnum):
    PROMPT = "prompt"
    """Its prefill waits, or is partly done."""
    GENERATION = "generation"
    """Prefilled, and not running: new, or paused with its KV in place."""
    RUNNING = "running"
    COMPLETE = "complete"
    """Planned to its limit: keeps its blocks until the end is confirmed."""


@dataclass(slots=True, eq=False)
class Slot:
    """Blocks [start, end) of a host, counted like the blocks it holds: free for a guest until it gets
    there."""

    start: int
    end: int
    level: int
    guest: "Job | None" = None


@dataclass(slots=True, eq=False)
class Job:
    task: Task
    generated_tokens: int
    prediction: LengthPrediction | None
    first_prediction: LengthPrediction | None = None
    stage: JobStage = JobStage.PROMPT
    computed_tokens: int = 0
    held_blocks: int = 0
    own_blocks: int = 0
    hosted_blocks: int = 0
    deadline_s: float = inf
    due_s: float = inf
    """What the slack classes of the queue it waits in count down to."""
    rest_tokens: int = 0
    """Padded tokens to come, as of when it last entered a queue or was predicted anew."""
    end_tokens: int = 0
    """Tokens in the cache when it is expected to end; of a running one."""
    rank: tuple[Any, ...] = ()
    """Its place in the queue it waits in; the last parts tell any two jobs apart."""
    slack_class: int = 0
    queued_as: int = 0
    """Number of its stay in a queue: clocked events of earlier stays are void."""
    host: "Job | None" = None
    slots: list[Slot] = field(default_factory=list)
    """Those it offers, lowest first; each with at most one guest."""
    new_blocks: int = 0
    """What it was given at its start beyond what it held: what its slots are cut from."""
    level: int = 0
    """How deep it is hosted; 0 is not at all."""

    @property
    def prefill_tokens(self) -> int:
        return self.task.prompt_tokens + self.generated_tokens

    @property
    def missing_tokens(self) -> int:
        return self.task.max_tokens - self.generated_tokens

    @property
    def reserved_blocks(self) -> int:
        """How far it may grow without asking again."""
        return self.own_blocks + self.hosted_blocks


def rank_of(job: Job) -> tuple[Any, ...]:
    return job.rank


def arrival_rank(job: Job) -> tuple[Any, ...]:
    """First come, first served."""
    return job.task.order
