"""The two admission rules: when a generation may start or continue, and how many blocks it reserves.

`ExactAdmission` reserves all blocks up to the predicted end at the start (papers/003 §3.2.2).
`ProfileAdmission` starts a generation if blocks suffice at every predicted completion (`policy/profile.py`),
and takes blocks as needed. An answer that outlives its prediction gets a new one. If the profile or the
reserve has no block for it, it pauses with its KV (algorithms.md §1, Beyond the paper: `ecoserve_profile`).

    16 blocks of 4 tokens are free; 44 tokens more are predicted for a, then 24 for b → exact: a owns 11, b
    has to wait for the sixth block. Profile: b ends when a is half-way, so both run at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping

from services.scheduler.policy.batch_builder import Job, JobTable
from services.scheduler.policy.lengths import LengthEstimates
from services.scheduler.policy.profile import UsageProfile
from services.scheduler.policy.waiting_queue import WaitingQueue
from shared.messages.sequence import SequenceKey


class AdmissionRule(ABC):
    """Admission rule of one worker. It reads the job table; the caller acts on it."""

    @abstractmethod
    def begin_plan(self) -> None:
        """Discard what was computed for the previous plan."""

    @abstractmethod
    def goes_on(self, job: Job) -> bool:
        """Return whether a running job's predicted end allows another token."""

    @abstractmethod
    def fits(self, job: Job) -> bool:
        """Return whether a ready job may start now."""

    @abstractmethod
    def start_blocks(self, job: Job) -> int:
        """Return the total blocks to reserve at a job's start."""

    @abstractmethod
    def pinned_blocks(self, job: Job, needed_blocks: int) -> int:
        """Return the total blocks to reserve for a pinned job, which needs `needed_blocks` beyond its own."""

    @abstractmethod
    def note_start(self, job: Job) -> None:
        """Record that a job started."""

    @abstractmethod
    def leaves_room(self, blocks: int) -> bool:
        """Return whether a prompt may take `blocks` blocks."""

    @abstractmethod
    def note_prompt(self, blocks: int) -> None:
        """Record that a prompt took `blocks` blocks."""

    @abstractmethod
    def room_tokens(self, job: Job) -> int:
        """Return the tokens until a running job must ask again."""


class ExactAdmission(AdmissionRule):
    """Each generation reserves the blocks up to its predicted end at its start."""

    def __init__(self, table: JobTable, ready: WaitingQueue, reserve_blocks: Callable[[], int]) -> None:
        self._table = table
        self._ready = ready
        self._reserve_blocks = reserve_blocks

    def begin_plan(self) -> None:
        """Do nothing: there is no state."""

    def goes_on(self, job: Job) -> bool:
        return True

    def fits(self, job: Job) -> bool:
        """Return whether the job fits the free blocks minus the reserve."""
        return self._lacking_blocks(job) <= max(0, self._table.free_blocks - self._reserve_blocks())

    def start_blocks(self, job: Job) -> int:
        """Return the blocks up to the predicted end, at most an empty worker's and at least the next
        token's."""
        target = self._table.blocks_for(job.computed_tokens + job.rest_tokens)
        clamped = min(target, self._table.capacity_blocks - self._reserve_blocks())
        return max(clamped, job.held_blocks, self._table.blocks_for(job.computed_tokens + 1))

    def pinned_blocks(self, job: Job, needed_blocks: int) -> int:
        lacking = min(self._lacking_blocks(job), self._table.free_blocks)
        return job.own_blocks + max(needed_blocks, lacking)

    def note_start(self, job: Job) -> None:
        """Do nothing: the blocks record it."""

    def leaves_room(self, blocks: int) -> bool:
        """Return whether the first ready generation would still fit."""
        head = self._ready.first()
        if head is None:
            return blocks <= self._table.free_blocks
        return self._lacking_blocks(head) <= self._table.free_blocks - blocks

    def note_prompt(self, blocks: int) -> None:
        """Do nothing: the free blocks record it."""

    def room_tokens(self, job: Job) -> int:
        return job.reserved_blocks * self._table.block_tokens - job.computed_tokens

    def _lacking_blocks(self, job: Job) -> int:
        return max(0, self.start_blocks(job) - job.own_blocks)


class ProfileAdmission(AdmissionRule):
    """Each generation reserves what it holds; the profile of the running ones admits others."""

    def __init__(
        self,
        table: JobTable,
        ready: WaitingQueue,
        reserve_blocks: Callable[[], int],
        running: Mapping[SequenceKey, Job],
        complete: Mapping[SequenceKey, Job],
        lengths: LengthEstimates,
        questions: MutableMapping[SequenceKey, int],
    ) -> None:
        self._table = table
        self._ready = ready
        self._reserve_blocks = reserve_blocks
        self._running = running
        self._complete = complete
        self._lengths = lengths
        self._questions = questions
        self._profile: UsageProfile | None = None
        self._prompt_room_blocks: int | None = None
        """Blocks that prompts may take in this plan."""

    def begin_plan(self) -> None:
        self._profile = self._prompt_room_blocks = None

    def goes_on(self, job: Job) -> bool:
        """Return whether the job may continue; one at its predicted end gets a new end."""
        if job.computed_tokens < job.end_tokens:
            return True
        rest = self._lengths.rest_tokens(job.prediction, job.generated_tokens, job.task.max_tokens)
        self._questions[job.task.key] = job.generated_tokens
        self._profile = None
        job.end_tokens = job.computed_tokens + rest
        if self._usage().free_blocks >= 0:
            return True
        job.end_tokens = job.computed_tokens + min(rest, self._table.block_tokens)
        self._profile = None
        return self._make_profile(self._table.capacity_blocks).free_blocks >= 0

    def fits(self, job: Job) -> bool:
        return self._usage().fits(job.computed_tokens, job.computed_tokens + job.rest_tokens, job.held_blocks)

    def start_blocks(self, job: Job) -> int:
        """Return the blocks up to the next token."""
        return self._table.blocks_for(job.computed_tokens + 1)

    def pinned_blocks(self, job: Job, needed_blocks: int) -> int:
        return self.start_blocks(job)

    def note_start(self, job: Job) -> None:
        if self._profile is not None:
            self._profile.start(job.computed_tokens, job.end_tokens, job.held_blocks)

    def leaves_room(self, blocks: int) -> bool:
        """Return whether a prompt may take the blocks. It may use the reserve, but no block that running jobs
        will need."""
        if self._prompt_room_blocks is None:
            usage, head = self._usage(), self._ready.first()
            room = usage.free_blocks
            if head is not None:
                ends = head.computed_tokens + head.rest_tokens
                room = min(room, usage.room_beside(head.computed_tokens, ends, head.held_blocks))
            self._prompt_room_blocks = room + self._reserve_blocks()
        return blocks <= min(self._prompt_room_blocks, self._table.free_blocks)

    def note_prompt(self, blocks: int) -> None:
        if self._prompt_room_blocks is not None:
            self._prompt_room_blocks -= blocks

    def room_tokens(self, job: Job) -> int:
        return job.end_tokens - job.computed_tokens

    def _usage(self) -> UsageProfile:
        """Return this plan's profile, including its starts."""
        if self._profile is None:
            self._profile = self._make_profile(self._table.capacity_blocks - self._reserve_blocks())
        return self._profile

    def _make_profile(self, limit_blocks: int) -> UsageProfile:
        growing = [
            (job.computed_tokens, max(job.end_tokens, job.computed_tokens), job.held_blocks)
            for job in self._running.values()
        ]
        ending = [
            (job.computed_tokens, job.computed_tokens, job.held_blocks) for job in self._complete.values()
        ]
        constant = (
            self._table.held_blocks - sum(item[2] for item in growing) - sum(item[2] for item in ending)
        )
        return UsageProfile(growing + ending, constant, limit_blocks, self._table.block_tokens)
