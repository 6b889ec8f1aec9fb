"""When a generation may start and go on, and how many blocks are set aside for it: the two rules there are.

`ExactAdmission`: at its start a generation gets all the blocks that its predicted end needs (papers/003
§3.2.2). `ProfileAdmission`: a generation starts if, as predicted, there will be enough at every completion
(`policy/profile.py`); blocks are taken as they are needed, out of one pool. An answer that outlives its
prediction is predicted anew and goes on where the profile allows it; else it takes a block's worth of the
reserve; else it pauses and keeps its KV (algorithms.md §1, Beyond the paper: `ecoserve_profile`).

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
    """One worker's rule. It reads the job table; whoever asks acts on it."""

    @abstractmethod
    def begin_plan(self) -> None:
        """What was found out for the plan before may be wrong by now."""

    @abstractmethod
    def goes_on(self, job: Job) -> bool:
        """Whether a running job may take a further token, as far as its predicted end is concerned."""

    @abstractmethod
    def fits(self, job: Job) -> bool:
        """Whether a ready job may start now."""

    @abstractmethod
    def start_blocks(self, job: Job) -> int:
        """What is set aside for it when it starts, in all."""

    @abstractmethod
    def pinned_blocks(self, job: Job, needed_blocks: int) -> int:
        """The same for a pinned one. It starts with what is there, and needs so many beyond its own."""

    @abstractmethod
    def note_start(self, job: Job) -> None:
        """It runs from now."""

    @abstractmethod
    def leaves_room(self, blocks: int) -> bool:
        """Whether a prompt may take so many blocks."""

    @abstractmethod
    def note_prompt(self, blocks: int) -> None:
        """A prompt has taken so many blocks."""

    @abstractmethod
    def room_tokens(self, job: Job) -> int:
        """Tokens until a running job has to ask again."""


class ExactAdmission(AdmissionRule):
    """Each generation owns, from its start, what its predicted end needs."""

    def __init__(self, table: JobTable, ready: WaitingQueue, reserve_blocks: Callable[[], int]) -> None:
        self._table = table
        self._ready = ready
        self._reserve_blocks = reserve_blocks

    def begin_plan(self) -> None:
        """Nothing is remembered."""

    def goes_on(self, job: Job) -> bool:
        return True

    def fits(self, job: Job) -> bool:
        """Into what is free, less the reserve."""
        return self._lacking_blocks(job) <= max(0, self._table.free_blocks - self._reserve_blocks())

    def start_blocks(self, job: Job) -> int:
        """Clamped to what an otherwise empty worker gives, and never less than the next token needs."""
        target = self._table.blocks_for(job.computed_tokens + job.rest_tokens)
        clamped = min(target, self._table.capacity_blocks - self._reserve_blocks())
        return max(clamped, job.held_blocks, self._table.blocks_for(job.computed_tokens + 1))

    def pinned_blocks(self, job: Job, needed_blocks: int) -> int:
        lacking = min(self._lacking_blocks(job), self._table.free_blocks)
        return job.own_blocks + max(needed_blocks, lacking)

    def note_start(self, job: Job) -> None:
        """Its blocks say it."""

    def leaves_room(self, blocks: int) -> bool:
        """The head generation's allocation still fits beside them, or no generation waits."""
        head = self._ready.first()
        if head is None:
            return blocks <= self._table.free_blocks
        return self._lacking_blocks(head) <= self._table.free_blocks - blocks

    def note_prompt(self, blocks: int) -> None:
        """The free blocks say it."""

    def room_tokens(self, job: Job) -> int:
        return job.reserved_blocks * self._table.block_tokens - job.computed_tokens

    def _lacking_blocks(self, job: Job) -> int:
        return max(0, self.start_blocks(job) - job.own_blocks)


class ProfileAdmission(AdmissionRule):
    """Each generation owns what it holds; the profile of those that run says who may join them."""

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
        """What prompts may take, once generations have been admitted."""

    def begin_plan(self) -> None:
        self._profile = self._prompt_room_blocks = None

    def goes_on(self, job: Job) -> bool:
        """A longer end is needed for one that has reached its own."""
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
        """Nothing beyond the next token."""
        return self._table.blocks_for(job.computed_tokens + 1)

    def pinned_blocks(self, job: Job, needed_blocks: int) -> int:
        return self.start_blocks(job)

    def note_start(self, job: Job) -> None:
        if self._profile is not None:
            self._profile.start(job.computed_tokens, job.end_tokens, job.held_blocks)

    def leaves_room(self, blocks: int) -> bool:
        """A prompt may use the reserve; those that run must never miss what it takes."""
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
        """As of this plan, up to date with whatever it has started."""
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
