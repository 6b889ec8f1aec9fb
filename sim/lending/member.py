"""One simulated worker that lends and borrows: the live lending cores, a block pool and an endless queue.

A request's whole memory is allocated when it starts, local memory first. Between two events all sequences
decode in lockstep. `iterations` counts the steps, so an end time is one number. The caller moves blocks
between workers.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from services.worker.core.costs.fitted import RemoteCost
from services.worker.kv.core.block_pool import BlockPool
from services.worker.peers.lending.core.borrowing import Borrowing
from services.worker.peers.lending.core.debts import BlockState, Debts
from services.worker.peers.lending.core.grants import Freed, Grants, Terms
from services.worker.peers.lending.core.settling import Settling
from shared.messages.reports import Capacity, WorkerReported
from sim.lending.workload import LendingJob

BLOCK_TOKENS = 128
LOOKAHEAD = 16
PATIENCE_S = 60.0
"""No request overtakes one that has waited longer than this."""
_KV = b"one model"
"""Fingerprint shared by all workers: one model and one block size."""


@dataclass(slots=True, eq=False)
class RunningJob:
    """A request with its memory; `ends_at` counts iterations of its worker."""

    job: LendingJob
    own: list[int]
    borrowed: list[int]
    ends_at: float = 0.0


@dataclass(slots=True)
class WaitingJob:
    job: LendingJob
    since_s: float


@dataclass(slots=True)
class LendingWorker:
    """State of one worker."""

    worker_id: str
    blocks: int
    stream: Iterator[LendingJob]
    cost: RemoteCost
    most_lent: float = 0.5
    bounce_blocks: int = 16
    pool: BlockPool = field(init=False)
    grants: Grants = field(init=False)
    debts: Debts = field(init=False)
    search: Borrowing = field(init=False)
    settling: Settling = field(init=False)
    queue: deque[WaitingJob] = field(default_factory=deque)
    running: dict[int, RunningJob] = field(default_factory=dict)
    holders: dict[int, RunningJob] = field(default_factory=dict)
    """Running jobs by the logical number of each borrowed block."""
    iterations: float = 0.0
    prefill_s: float = 0.0
    """Prefill time still to compute."""
    generated_tokens: float = 0.0
    prefilled_tokens: int = 0
    finished: int = 0
    beats: int = 0
    _ends: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.blocks, BLOCK_TOKENS)
        terms = Terms(int(self.blocks * self.most_lent), fingerprint=_KV)
        self.grants = Grants(self.worker_id, 1, terms, self.blocks)
        self.debts = Debts(self.worker_id, self.blocks, 1)
        self.search = Borrowing(self.worker_id, 1, BLOCK_TOKENS, _KV, most_rounds=2)
        self.settling = Settling(self.debts, self.grants)
        self.settling.bounce = self.pool.allocate(self.bounce_blocks)

    # --- requests

    def fill_queue(self, now_s: float) -> None:
        while len(self.queue) < LOOKAHEAD:
            self.queue.append(WaitingJob(next(self.stream), now_s))

    def next_job(self, at: int, now_s: float) -> LendingJob | None:
        """Return the job at position `at`; None if it may not overtake the first one."""
        if at >= len(self.queue) or (at and now_s - self.queue[0].since_s > PATIENCE_S):
            return None
        return self.queue[at].job

    def start(self, at: int, blocks: int, now_s: float) -> None:
        """Start a job: allocate local blocks first, then borrowed ones."""
        job = self.queue[at].job
        del self.queue[at]
        own = self.pool.allocate(min(blocks, self.pool.free_blocks))
        one = RunningJob(job, own, self.debts.take(blocks - len(own)))
        self.running[job.number] = one
        self.holders.update(dict.fromkeys(one.borrowed, one))
        self.prefill_s += self.cost.cost.step_s([(0, job.prompt_tokens)], 0, 0)
        self.prefilled_tokens += job.prompt_tokens
        one.ends_at = self.iterations + job.output_tokens
        heappush(self._ends, (one.ends_at, job.number))

    def end_due(self) -> None:
        """End the requests that have their last token and free their memory."""
        while self._ends and self._ends[0][0] <= self.iterations:
            one = self.running.pop(heappop(self._ends)[1])
            self.pool.release(one.own)
            self.debts.release(one.borrowed)
            for number in one.borrowed:
                self.holders.pop(number, None)
            self.finished += 1
            self.generated_tokens += one.job.output_tokens

    def swap(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Replace borrowed blocks with local ones."""
        for number, own in pairs:
            one = self.holders.pop(number)
            one.borrowed.remove(number)
            one.own.append(own)

    # --- time

    @property
    def remote_tokens(self) -> dict[str, int]:
        """Tokens in borrowed blocks, by creditor."""
        counts: dict[str, int] = {}
        for number in self.holders:
            creditor = self.debts.blocks[number].grant.creditor_id
            counts[creditor] = counts.get(creditor, 0) + BLOCK_TOKENS
        return counts

    @property
    def local_tokens(self) -> int:
        return sum(len(one.own) for one in self.running.values()) * BLOCK_TOKENS

    def step_s(self, remote: dict[str, int]) -> float:
        return self.cost.step_s([], len(self.running), self.local_tokens, remote.values())

    def advance(self, seconds: float, step_s: float, served_share: float) -> None:
        """Advance by `seconds`: prefill for up to half the time, then decode. `served_share` of the time
        is spent on attention for debtors."""
        left_s = seconds * (1 - served_share)
        prefill_s = min(self.prefill_s, left_s / 2 if self.running else left_s)
        self.prefill_s -= prefill_s
        if self.running:
            self.iterations += (left_s - prefill_s) / step_s
        self.end_due()

    # --- lending

    def free(self, freed: list[Freed]) -> None:
        for part in freed:
            self.pool.readmit(part.blocks)
        missing = min(self.bounce_blocks - len(self.settling.bounce), self.pool.free_blocks)
        if missing > 0:
            self.settling.bounce += self.pool.allocate(missing)

    def report(self) -> WorkerReported:
        self.beats += 1
        room = self.grants.terms.most_blocks - self.grants.lent_blocks()
        return WorkerReported(
            worker_id=self.worker_id,
            incarnation=1,
            seq=self.beats,
            stepped_seq=0,
            epoch=1,
            plan_seq=0,
            model="simulated",
            fingerprint=_KV,
            block_tokens=BLOCK_TOKENS,
            max_context_tokens=self.blocks * BLOCK_TOKENS,
            capacity=Capacity(
                total_blocks=self.pool.total_blocks,
                free_blocks=self.pool.free_blocks,
                lent_blocks=self.pool.withdrawn_blocks,
                borrowed_blocks=self.debts.borrowed_blocks,
                lendable_blocks=max(0, min(self.pool.free_blocks, room)),
            ),
            lent_to_blocks=self.grants.lent_to(),
            borrowed_from_blocks=self.debts.borrowed_from(),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError if memory and requests disagree."""
        held = [block for one in self.running.values() for block in one.own]
        self.pool.check_integrity([*held, *self.settling.bounce])
        self.grants.check_integrity()
        self.debts.check_integrity()
        assert set(self.holders) == {n for one in self.running.values() for n in one.borrowed}
        in_use = {*self.debts.in_state(BlockState.USED), *self.debts.in_state(BlockState.FROZEN)}
        assert set(self.holders) <= in_use
