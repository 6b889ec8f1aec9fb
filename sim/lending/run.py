"""Simulate workers with more requests than memory, a ledger, and debt settlement, in steps of `BEAT_S`.

Decisions are the live ones (ledger, candidates, grants, searches, settlements); times come from `cost`.
Messages take no time and are never lost. Source: papers/001 §6.4, Figure 10.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from services.ledger.core.debt_ledger import DebtLedger, candidates
from services.ledger.core.dgfm.coordinator import Coordinator, SettlementAsk, SettleRules
from services.worker.core.costs.fitted import LLAMA2_13B_2_A100, RemoteCost
from services.worker.peers.lending.core.borrowing import CreditorPressure, CreditorQuestion, in_order
from services.worker.peers.lending.core.debts import BlockState, Repayment
from services.worker.peers.lending.core.grants import lend
from services.worker.peers.lending.core.settling import Copy, Swap
from shared.messages.commands import CreditorCandidates, FindCreditors
from shared.messages.lending import BorrowReply, KvTier, Settled
from sim.events import EventQueue
from sim.lending.member import BLOCK_TOKENS, LendingWorker
from sim.lending.workload import Mix, jobs

BEAT_S = 0.25
REPAY_S = 1.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """Settings of one run."""

    workers: int = 4
    kv_tokens: int = 150_016
    """KV capacity of one worker: 160 GB less weights and activations."""
    duration_s: float = 3600.0
    seed: int = 0
    settles: bool = True
    """Whether cycles of debts are settled (DGFM)."""
    repays: bool = True
    """Whether debts are repaid into free memory."""
    threshold_blocks: int = 8
    most_lent: float = 0.5
    """Largest share of a worker's memory that it lends."""
    mix: Mix = field(default_factory=Mix)
    cost: RemoteCost = field(default_factory=lambda: RemoteCost(LLAMA2_13B_2_A100))


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of one heartbeat interval."""

    at_s: float
    output_tokens: float
    """Tokens generated in the interval, over all workers."""
    remote_tokens: int
    used_tokens: int


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one run."""

    samples: tuple[Sample, ...]
    finished: int
    recalled_blocks: int
    settlements: int
    aborted: int

    def tok_s(self, first_s: float = 0.0, end_s: float = float("inf")) -> float:
        """Return output tokens per second in a part of the run."""
        part = [sample for sample in self.samples if first_s <= sample.at_s < end_s]
        return sum(sample.output_tokens for sample in part) / (len(part) * BEAT_S)

    def remote_share(self, first_s: float = 0.0, end_s: float = float("inf")) -> float:
        """Return the share of KV in use that is remote, in a part of the run."""
        part = [sample for sample in self.samples if first_s <= sample.at_s < end_s]
        return sum(sample.remote_tokens for sample in part) / max(1, sum(s.used_tokens for s in part))


class LendingSimulation:
    """One run. `check` verifies every invariant after each interval: slow, for tests."""

    def __init__(self, scenario: Scenario, *, check: bool = False) -> None:
        self.scenario = scenario
        self._check = check
        self.now_s = 0.0
        self.ledger = DebtLedger()
        blocks = scenario.kv_tokens // BLOCK_TOKENS
        self.members = {
            f"w{at}": LendingWorker(
                f"w{at}", blocks, jobs(scenario.mix, scenario.seed, at), scenario.cost, scenario.most_lent
            )
            for at in range(scenario.workers)
        }
        threshold = scenario.threshold_blocks * BLOCK_TOKENS
        self.coordinator = Coordinator("sim", SettleRules(threshold_tokens=threshold, interval_s=1.0))
        self._later: EventQueue[Callable[[], None]] = EventQueue()
        self._recalled = 0
        self._repaying: set[str] = set()

    def run(self) -> Result:
        samples = []
        for _ in range(int(self.scenario.duration_s / BEAT_S)):
            samples.append(self.interval())
            if self._check:
                self.check_integrity()
        return Result(
            tuple(samples),
            sum(member.finished for member in self.members.values()),
            self._recalled,
            self.coordinator.completed,
            self.coordinator.aborted,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        for member in self.members.values():
            member.check_integrity()
        self.ledger.check_integrity()
        self.coordinator.check_integrity()
        lent = sum(member.grants.lent_blocks() for member in self.members.values())
        assert lent == sum(member.debts.borrowed_blocks for member in self.members.values())

    def interval(self) -> Sample:
        """Run one interval of `BEAT_S`."""
        for member in self.members.values():
            member.fill_queue(self.now_s)
            self._admit(member)
        remote = {name: member.remote_tokens for name, member in self.members.items()}
        sample = self._compute(remote)
        self.now_s += BEAT_S
        self._run_due()
        for member in self.members.values():
            self._keep_leases(member)
            self.ledger.on_reported(member.report(), self.now_s)
        if self.scenario.settles:
            sizes = dict.fromkeys(self.members, BLOCK_TOKENS)
            self._send(self.coordinator.on_tick(self.ledger.debts(), sizes, self.now_s))
        if self.scenario.repays and self.now_s % REPAY_S < BEAT_S:
            for member in self.members.values():
                self._repay(member)
        return sample

    def _compute(self, remote: dict[str, dict[str, int]]) -> Sample:
        cost = self.scenario.cost
        steps = {name: member.step_s(remote[name]) for name, member in self.members.items()}
        served = dict.fromkeys(self.members, 0.0)
        for name, by_creditor in remote.items():
            for creditor, tokens in by_creditor.items():
                served[creditor] += min(0.9, cost.serving_s(tokens) / steps[name])
        made = 0.0
        for name, member in self.members.items():
            before, sequences = member.iterations, len(member.running)
            member.advance(BEAT_S, steps[name], min(0.9, served[name]))
            made += (member.iterations - before) * sequences
        remote_tokens = sum(sum(by_creditor.values()) for by_creditor in remote.values())
        local_tokens = sum(member.local_tokens for member in self.members.values())
        return Sample(self.now_s, made, remote_tokens, remote_tokens + local_tokens)

    # --- memory

    def _admit(self, member: LendingWorker) -> None:
        """Start waiting requests in order, skipping those that do not fit."""
        at = 0
        while (job := member.next_job(at, self.now_s)) is not None:
            blocks = -(-(job.prompt_tokens + job.output_tokens) // BLOCK_TOKENS)
            missing = blocks - member.pool.free_blocks - member.debts.free_blocks
            if missing > 0 and member.search.may_start(self.now_s):
                self._search(member, member.search.start(missing))
                missing = blocks - member.pool.free_blocks - member.debts.free_blocks
            if missing <= 0:
                member.start(at, blocks, self.now_s)
            else:
                at += 1
        self._return(member, member.debts.give_back(member.debts.free_blocks))

    def _search(self, member: LendingWorker, question: CreditorQuestion | None) -> None:
        while question is not None:
            if isinstance(question, FindCreditors):
                found = candidates(self.ledger, question.debtor_id, question.tokens, question.refused_by)
                answer = CreditorCandidates(candidates=tuple(found))
                question = member.search.on_candidates(answer, self.now_s)
                continue
            creditor = self.members[question.creditor_id]
            reply = creditor.grants.answer(question.question)
            if not isinstance(reply, BorrowReply):
                taken = lend(creditor.pool, reply, 1, 0)
                reply = creditor.grants.lend(question.question, taken, self.now_s)
            if reply.grant is not None:
                member.debts.on_granted(reply.grant, self.now_s)
            question = member.search.on_reply(question.creditor_id, reply, self.now_s)

    def _return(self, member: LendingWorker, repayments: list[Repayment]) -> None:
        for repayment in repayments:
            creditor = self.members[repayment.creditor_id]
            reply, freed = creditor.grants.give_back(repayment.message)
            member.debts.on_returned(repayment, reply)
            creditor.free([] if freed is None else [freed])

    def _keep_leases(self, member: LendingWorker) -> None:
        for due in member.debts.renewals(self.now_s):
            reply = self.members[due.creditor_id].grants.renew(due.message, self.now_s)
            assert not member.debts.on_renewed(due, reply, self.now_s), "nobody dies here"

    # --- debts

    def _send(self, asks: list[SettlementAsk]) -> None:
        for ask in asks:
            member = self.members[ask.worker_id]
            outcome = member.settling.on_settle(ask.message, self.now_s)
            if isinstance(outcome, Settled):
                self._hear(ask, outcome)
            elif isinstance(outcome, Copy):
                self._copy(member, ask, outcome)
            else:
                self._swap(member, outcome)
                self._hear(ask, outcome.answer)

    def _copy(self, member: LendingWorker, ask: SettlementAsk, copy: Copy) -> None:
        took_s = self.scenario.cost.copy_s(len(copy.pairs) * BLOCK_TOKENS)

        def done() -> None:
            self._hear(ask, member.settling.on_copied(ask.message, whole=True))

        self._later.push(self.now_s + took_s, 0, done)

    def _swap(self, member: LendingWorker, swap: Swap) -> None:
        member.swap(swap.pairs)
        self._recalled += len(swap.pairs)
        self._return(member, list(swap.repayments))

    def _hear(self, ask: SettlementAsk, answer: Settled) -> None:
        self._send(self.coordinator.on_answer(ask.message, ask.worker_id, answer))

    def _repay(self, member: LendingWorker) -> None:
        """Recall borrowed blocks into free local memory, one copy at a time."""
        if member.settling.is_on or member.worker_id in self._repaying or not member.pool.free_blocks:
            return
        blocks, by_creditor = member.debts.blocks, dict[str, list[int]]()
        for number in member.debts.in_state(BlockState.USED):
            if number in member.holders:
                by_creditor.setdefault(blocks[number].grant.creditor_id, []).append(number)
        free = {name: one.pool.free_blocks / one.blocks for name, one in self.members.items()}
        pressures = {name: CreditorPressure(free_fraction=share) for name, share in free.items()}
        order = in_order(((name, KvTier.DEVICE) for name in by_creditor), pressures)
        found = [number for name, _ in order for number in by_creditor[name]]
        chosen = set(found[: member.pool.free_blocks])
        if chosen:
            self._recall(member, [number for number in blocks if number in chosen])

    def _recall(self, member: LendingWorker, chosen: list[int]) -> None:
        home = member.pool.allocate(len(chosen))
        member.settling.bounce += home
        member.debts.freeze(chosen)
        self._repaying.add(member.worker_id)
        took_s = self.scenario.cost.copy_s(len(chosen) * BLOCK_TOKENS)

        def done() -> None:
            self._repaying.discard(member.worker_id)
            member.settling.bounce = [block for block in member.settling.bounce if block not in set(home)]
            pairs = [(n, own) for n, own in zip(chosen, home, strict=True) if n in member.holders]
            kept = {own for _, own in pairs}
            member.swap(tuple(pairs))
            member.pool.release([own for own in home if own not in kept])
            self._recalled += len(pairs)
            self._return(member, member.debts.recalled(chosen))

        self._later.push(self.now_s + took_s, 0, done)

    def _run_due(self) -> None:
        while self._later.due_s <= self.now_s:
            self._later.pop()[1]()
