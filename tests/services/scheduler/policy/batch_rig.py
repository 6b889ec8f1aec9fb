"""Runs a policy's batches a plan or two behind it, as a worker would, with strict book-keeping of blocks
and tokens.

For any `BatchPolicy`: what a batch may be is in `policy/contract.py`, and this is its judge.
"""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
from hypothesis import strategies as st

from services.scheduler.policy.contract import (
    BatchPolicy,
    Holding,
    PlannedBatch,
    PlannedDecode,
    PlannedPrefill,
    PolicyFactory,
    PolicySettings,
    Task,
    WorkerShape,
)
from shared.messages.commands import LengthPrediction
from shared.messages.sequence import SequenceKey
from tests.shared.messages.builders import predicted

CAPACITY_BLOCKS = 24
BLOCK_TOKENS = 4
Jobs = list[tuple[int, int, int, int]]
"""(prompt tokens, natural answer tokens, max tokens, batches before the next arrival)"""

jobs_of = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 60), st.integers(1, 50), st.integers(0, 12)),
    min_size=1,
    max_size=25,
)
guesses_of = st.lists(st.none() | st.integers(0, 70) | st.sampled_from([-5, 10**9]), min_size=1, max_size=12)
"""What a predictor says, in turn: nothing, something, or nonsense."""
settings_of = st.builds(
    PolicySettings,
    chunked_prefill=st.booleans(),
    max_batch_sequences=st.integers(1, 8),
    token_budget=st.integers(8, 64),
    max_steps=st.integers(1, 8),
    start_tokens=st.integers(8, 200),
)


@dataclass(eq=False)
class Job:
    """A task, how long its answer really is, and where it stands at the worker."""

    task: Task
    length: int
    generated: int = 0
    computed: int = 0
    blocks: int = 0
    decoding: bool = False
    started: bool = False
    over: bool = False
    promised: int = 0
    """Tokens that the policy was told are stored."""

    @property
    def total(self) -> int:
        return self.task.prompt_tokens + self.generated

    @property
    def holding(self) -> Holding:
        return Holding(self.computed, self.blocks, self.decoding)


@dataclass
class BatchRig:
    """`lag` batches are planned before the first of them runs; ends are told to the policy after they
    happened."""

    make_policy: PolicyFactory
    shape: WorkerShape
    settings: PolicySettings
    lag: int = 1
    now_s: float = 0.0
    jobs: dict[SequenceKey, Job] = field(default_factory=dict)
    planned: deque[PlannedBatch] = field(default_factory=deque)
    batches: list[PlannedBatch] = field(default_factory=list)
    started: list[SequenceKey] = field(default_factory=list)
    """In order of their first chunk."""
    on_batch: Callable[[PlannedBatch], None] = lambda batch: None
    predict: Callable[[Job, int], LengthPrediction | None] = lambda job, generated_tokens: None
    """Asked at every arrival and by every question; the answer comes after the batch it came with."""
    stored: Callable[[Job], int] = lambda job: 0
    """Tokens of it that the worker's prefix cache has when it is prefilled from the beginning."""

    def __post_init__(self) -> None:
        self.policy: BatchPolicy = self.make_policy(self.shape, self.settings)
        self.capacity_blocks = self.shape.capacity_blocks

    def arrive(
        self,
        name: str,
        prompt_tokens: int,
        length: int,
        max_tokens: int,
        guess: int | None = None,
        priority: int = 0,
    ) -> Job:
        """With `guess` somebody predicts its length, whoever else does."""
        task = Task((name, 0), prompt_tokens, max_tokens, self.now_s, priority=priority)
        job = self.jobs[task.key] = Job(task, length)
        self.policy.on_arrival(task, self.now_s)
        self.policy.check_integrity()
        self._answer(job, 0)
        if guess is not None:
            self.policy.on_predicted(task.key, predicted(guess), self.now_s)
            self.policy.check_integrity()
        return job

    def _answer(self, job: Job, generated_tokens: int) -> None:
        prediction = self.predict(job, generated_tokens)
        if prediction is not None:
            self.policy.on_predicted(job.task.key, prediction, self.now_s)
            self.policy.check_integrity()

    def end(self, job: Job) -> None:
        """Cancelled, or over by itself."""
        job.over, job.blocks, job.computed = True, 0, 0
        self.policy.on_ended(job.task.key, self.now_s, job.generated)
        self.policy.check_integrity()

    def drain(self) -> None:
        """Run what is planned, and plan nothing new."""
        while self.planned:
            self._run(self.planned.popleft())

    def swap(self, make_policy: PolicyFactory) -> None:
        """Another policy takes over what lives at the worker, whatever the one before allocated."""
        self.drain()
        self.policy = make_policy(replace(self.shape, capacity_blocks=self.capacity_blocks), self.settings)
        for job in self.unfinished:
            task = msgspec.structs.replace(job.task, generated_tokens=job.generated)
            if job.blocks:
                self.policy.on_adopted(task, job.holding, self.now_s)
            else:
                self.policy.on_arrival(task, self.now_s)
        self.policy.check_integrity()

    def resize(self, capacity_blocks: int) -> None:
        """Planned batches run first: only then has the worker shrunk."""
        self.drain()
        self.capacity_blocks = capacity_blocks
        self.policy.on_resized(capacity_blocks, self.now_s)

    @property
    def unfinished(self) -> list[Job]:
        return [job for job in self.jobs.values() if not job.over]

    def turn(self) -> bool:
        """Plan up to `lag` ahead, run one batch. False when there was nothing to do."""
        self.now_s += 0.01
        while len(self.planned) <= self.lag:
            batch = self.policy.plan(self.now_s)
            self.policy.check_integrity()
            if batch is None:
                break
            self._judge(batch)
            self.on_batch(batch)
            self.batches.append(batch)
            self.planned.append(batch)
            for question in batch.questions:
                self._answer(self.jobs[question.key], question.generated_tokens)
        if not self.planned:
            return False
        self._run(self.planned.popleft())
        return True

    def finish(self, *, limit: int = 20_000) -> None:
        """Until every job is over; AssertionError when nothing moves any more or it takes too long."""
        for _ in range(limit):
            if not self.unfinished:
                return
            assert self.turn(), f"wedged with {[job.task.key for job in self.unfinished]}"
        raise AssertionError(f"still {len(self.unfinished)} after {limit} batches")

    def _judge(self, batch: PlannedBatch) -> None:
        """What can be said of a batch before it runs."""
        keys = [item.key for item in batch.prefills] + [item.key for item in batch.decodes]
        assert len(keys) == len(set(keys)) and not set(keys) & {item.key for item in batch.preemptions}
        assert keys or batch.preemptions, "an empty batch"
        assert len(keys) <= self.settings.max_batch_sequences and 1 <= batch.steps <= self.settings.max_steps
        assert batch.steps == 1 or batch.decodes_only
        tokens = sum(item.end_token - item.first_token for item in batch.prefills) + len(batch.decodes)
        alone = not self.settings.chunked_prefill and len(batch.prefills) == 1
        assert tokens <= self.settings.token_budget or alone, "over the token budget"
        starting = [self.jobs[item.key].total for item in batch.prefills if item.first_token == 0]
        assert len(starting) <= 1 or sum(starting) <= self.settings.start_tokens

    def _run(self, batch: PlannedBatch) -> None:
        for preemption in batch.preemptions:
            job = self.jobs[preemption.key]
            job.computed = job.blocks = job.promised = 0
            job.decoding = False
        for prefill in batch.prefills:
            job = self.jobs[prefill.key]
            if job.over:
                continue
            assert prefill.first_token < prefill.end_token <= job.total, "misaligned"
            is_start = job.computed == 0
            if is_start:
                job.promised = min(self.stored(job), job.total - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            aligned = prefill.first_token == job.computed or prefill.first_token <= job.promised
            assert aligned, "misaligned"
            self._allocate(job, prefill.allocated_blocks, prefill.end_token)
            job.computed = max(job.computed, min(job.promised, job.blocks * BLOCK_TOKENS))
            if not job.started:
                job.started = True
                self.started.append(prefill.key)
            self._compute(job, max(job.computed, prefill.end_token))
            if is_start and job.promised:
                self.policy.on_prefix_hit(prefill.key, job.promised, self.now_s)
                self.policy.check_integrity()
        for step in range(batch.steps):
            for decode in batch.decodes:
                job = self.jobs[decode.key]
                if not job.over:
                    assert step < decode.tokens, "a decode that was not counted on"
                    assert job.computed == job.total - 1, "misaligned"
                    self._allocate(job, decode.allocated_blocks, job.total)
                    self._compute(job, job.total)

    def _allocate(self, job: Job, blocks: int, tokens: int) -> None:
        job.blocks = max(job.blocks, blocks)
        assert job.blocks * self.shape.block_tokens >= tokens, "exhausted"
        assert sum(other.blocks for other in self.jobs.values()) <= self.capacity_blocks, "no blocks"

    def _compute(self, job: Job, tokens: int) -> None:
        job.computed = tokens
        if tokens == job.total:
            job.decoding = True
            job.generated += 1
            if job.generated >= min(job.length, job.task.max_tokens):
                self.end(job)


def rig(
    make_policy: PolicyFactory,
    policy_settings: PolicySettings | None = None,
    *,
    blocks: int = CAPACITY_BLOCKS,
    lag: int = 1,
) -> BatchRig:
    """A small worker under that policy."""
    return BatchRig(make_policy, WorkerShape(BLOCK_TOKENS, blocks), policy_settings or PolicySettings(), lag)


def in_turn(guesses: list[int | None]) -> Callable[[Job, int], LengthPrediction | None]:
    """A predictor that says these things, one after the other, for ever."""
    said = itertools.cycle(guesses)

    def predict(job: Job, generated_tokens: int) -> LengthPrediction | None:
        guess = next(said)
        return None if guess is None else predicted(guess)

    return predict


def truth(job: Job, generated_tokens: int) -> LengthPrediction:
    """The oracle."""
    return predicted(min(job.length, job.task.max_tokens))


def items_of(batch: PlannedBatch) -> list[PlannedPrefill | PlannedDecode]:
    """All that the batch computes."""
    return [*batch.prefills, *batch.decodes]


def play(
    bench: BatchRig,
    jobs: Jobs,
    disturb: Callable[[int], object] = lambda number: None,
    priorities: Sequence[int] = (0,),
) -> None:
    """All of them, to their ends, their priorities in turn; `disturb` is called before each next one."""
    for number, (prompt, length, limit, pause) in enumerate(jobs):
        priority = priorities[number % len(priorities)]
        bench.arrive(f"r{number:02}", prompt, length, limit, priority=priority)
        for _ in range(pause):
            bench.turn()
        disturb(number)
    bench.finish()
