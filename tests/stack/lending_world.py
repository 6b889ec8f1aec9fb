"""Workers that lend, and a ledger, in one process on virtual time: the pure cores and nothing replaced.

Messages wait in a box until the test delivers or loses them, in any order; a lost question or answer reaches
the asker as a deadline. Workers die with all they know and come back empty.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from services.ledger.core.debt_ledger import DebtLedger, candidates
from services.worker.kv.core.block_pool import BlockPool
from services.worker.peers.lending.core.borrowing import Borrowing, CreditorQuestion
from services.worker.peers.lending.core.debts import BlockState, Debts, Renewal, Repayment
from services.worker.peers.lending.core.grants import Freed, Grants, Terms, lend
from services.worker.peers.lending.service import section
from shared.messages.commands import CreditorCandidates, FindCreditors
from shared.messages.lending import BlocksReturned, BorrowBlocks, BorrowReply, KvTier, ReturnBlocks
from shared.messages.reports import Capacity, WorkerReported
from tests.shared.messages.builders import worker_report
from tests.stack.actors import FINGERPRINT

BLOCKS, CAP, KEEP, LEASE_S, GRACE_S = 12, 8, 1, 4.0, 0.5
HOST_BLOCKS = 5
"""Of host memory, where a world has any."""


@dataclass
class Letter:
    """On its way: `deliver` at the receiver, or `lose` at the asker."""

    deliver: Callable[[], None]
    lose: Callable[[], None]


@dataclass
class Member:
    """One worker in its present life."""

    worker_id: str
    incarnation: int
    host_blocks: int = 0
    pool: BlockPool = field(default_factory=lambda: BlockPool(BLOCKS, 16))
    beats: int = 0
    own: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    """Own blocks for other purposes."""
    on_lost: Callable[[list[int]], None] = lambda _: None

    def __post_init__(self) -> None:
        self.host = BlockPool(max(1, self.host_blocks), 16)
        terms = Terms(CAP, LEASE_S, GRACE_S, FINGERPRINT, most_host_blocks=self.host_blocks)
        self.grants = Grants(self.worker_id, self.incarnation, terms, BLOCKS, self.host_blocks)
        self.debts = Debts(self.worker_id, BLOCKS, self.incarnation)
        self.search = Borrowing(self.worker_id, self.incarnation, 16, FINGERPRINT, rest_s=0.0)

    def free(self, freed: list[Freed]) -> None:
        for part in freed:
            self.pool_of(part.tier).readmit(part.blocks)

    def pool_of(self, tier: KvTier) -> BlockPool:
        return self.pool if tier is KvTier.DEVICE else self.host

    def held_of(self, tier: KvTier) -> list[int]:
        """Own blocks in use."""
        return [*self.own, *self.kept] if tier is KvTier.DEVICE else []

    def lose(self, logical: list[int]) -> None:
        self.used = [number for number in self.used if number not in set(logical)]
        self.on_lost(logical)

    def report(self) -> WorkerReported:
        self.beats += 1
        capacity = Capacity(total_blocks=self.pool.total_blocks, free_blocks=self.pool.free_blocks)
        report = worker_report(
            self.worker_id,
            incarnation=self.incarnation,
            seq=self.beats,
            capacity=capacity,
            fingerprint=FINGERPRINT,
        )
        host_free = self.host.free_blocks if self.host_blocks else 0
        spare_blocks = self.pool.free_blocks - KEEP
        lent = section(capacity, self.debts, self.grants, spare_blocks, host_free)
        return msgspec.structs.replace(report, **lent)


class LendingWorld:
    """`letters` holds what is on its way."""

    def __init__(self, workers: int, host_blocks: int = 0) -> None:
        self.now_s = 0.0
        self.host_blocks = host_blocks
        self.letters: list[Letter] = []
        self.ledger = DebtLedger(silence_s=2.0)
        self.names = [f"w{number}" for number in range(workers)]
        self.members = {name: Member(name, 1, host_blocks) for name in self.names}

    # --- what a test does

    def beat(self, name: str) -> None:
        report = self.members[name].report()
        self._post(lambda: self.ledger.on_reported(report, self.now_s))

    def need(self, name: str, blocks: int) -> None:
        member = self.members[name]
        if member.search.may_start(self.now_s):
            self._pursue(member, member.search.start(blocks))

    def use(self, name: str, blocks: int) -> None:
        member = self.members[name]
        taken = member.debts.take(min(blocks, member.debts.free_blocks))
        member.used += taken
        self.on_used(member, taken)

    def keeps(self, member: Member) -> int:
        """Free blocks that it does not lend."""
        return KEEP

    def on_used(self, member: Member, taken: list[int]) -> None:
        """A sequence writes into borrowed blocks."""

    def stop_using(self, name: str, blocks: int) -> None:
        member = self.members[name]
        done, member.used = member.used[:blocks], member.used[blocks:]
        member.debts.release(done)

    def give_back(self, name: str, blocks: int) -> None:
        self.members[name].debts.give_back(blocks)

    def compute(self, name: str, blocks: int) -> None:
        """The worker's own requests take, or with a negative number free, blocks."""
        member = self.members[name]
        if blocks < 0:
            member.pool.release(member.own[:-blocks])
            del member.own[:-blocks]
        else:
            member.own += member.pool.allocate(min(blocks, member.pool.free_blocks))

    def kill(self, name: str) -> None:
        self.members[name] = Member(name, self.members[name].incarnation + 1, self.host_blocks)

    def restart_ledger(self) -> None:
        self.ledger = DebtLedger(silence_s=2.0)

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        self.ledger.on_tick(self.now_s)
        for member in self.members.values():
            self._tick(member)

    def deliver_all(self) -> None:
        """In order, what comes of it included."""
        for _ in range(1000):
            if not self.letters:
                return
            self.letters.pop(0).deliver()
            self.check()
        raise AssertionError("they talk for ever")

    def borrow(self, name: str, blocks: int) -> None:
        """A whole search, and what it finds is used."""
        self.need(name, blocks)
        self.deliver_all()
        self.use(name, blocks)

    def silence(self, half_seconds: int) -> None:
        """Nothing arrives for so long."""
        for _ in range(half_seconds):
            self.advance(0.5)
            self.check()

    # --- how the cores are connected

    def _post(self, deliver: Callable[[], None], lose: Callable[[], None] = lambda: None) -> None:
        self.letters.append(Letter(deliver, lose))

    def _ask(
        self,
        asker: Member,
        receiver: str | None,
        question: Callable[[Any], Any],
        on_answer: Callable[[Any], None],
        on_silence: Callable[[], None],
    ) -> None:
        """`question` is put to whoever has the name when it arrives. An asker that died hears nothing."""
        alive = asker.incarnation

        def if_alive(call: Callable[[], None]) -> Callable[[], None]:
            def checked() -> None:
                if self.members[asker.worker_id].incarnation == alive:
                    call()

            return checked

        def serve() -> None:
            answer = question(self.ledger if receiver is None else self.members[receiver])
            self._post(if_alive(lambda: on_answer(answer)), if_alive(on_silence))

        self._post(serve, if_alive(on_silence))

    def _pursue(self, member: Member, question: CreditorQuestion | None) -> None:
        if question is None:
            return
        sent_s, asked = self.now_s, question
        if isinstance(asked, FindCreditors):
            self._ask(
                member,
                None,
                lambda table: _found(table, asked),
                lambda answer: self._pursue(member, member.search.on_candidates(answer, self.now_s)),
                lambda: member.search.on_no_ledger(self.now_s),
            )
            return

        def on_reply(reply: BorrowReply | None) -> None:
            if reply is not None and reply.grant is not None:
                member.debts.on_granted(reply.grant, sent_s)
            self._pursue(member, member.search.on_reply(asked.creditor_id, reply, self.now_s))

        self._ask(
            member,
            asked.creditor_id,
            lambda creditor: self._lend(creditor, asked.question),
            on_reply,
            lambda: on_reply(None),
        )

    def _lend(self, creditor: Member, asked: BorrowBlocks) -> BorrowReply:
        creditor.free(creditor.grants.on_incarnation(asked.debtor_id, asked.debtor_incarnation))
        answer = creditor.grants.answer(asked)
        if isinstance(answer, BorrowReply):
            return answer
        keep = self.keeps(creditor) if asked.tier is KvTier.DEVICE else 0
        taken = lend(creditor.pool_of(asked.tier), answer, asked.least_blocks, keep)
        return creditor.grants.lend(asked, taken, self.now_s)

    def _tick(self, member: Member) -> None:
        now_s = self.now_s
        member.free(member.grants.tick(now_s))
        member.lose(member.debts.tick(now_s))
        for due in member.debts.renewals(now_s):
            self._renew(member, due)
        for repayment in member.debts.retries():
            self._repay(member, repayment, lambda _: None)

    def _renew(self, member: Member, due: Renewal) -> None:
        sent_s = self.now_s
        self._ask(
            member,
            due.creditor_id,
            lambda creditor: creditor.grants.renew(due.message, self.now_s),
            lambda reply: member.lose(member.debts.on_renewed(due, reply, sent_s)),
            lambda: None,
        )

    def _repay(self, member: Member, repayment: Repayment, on_done: Callable[[bool], None]) -> None:
        def on_returned(reply: BlocksReturned) -> None:
            member.debts.on_returned(repayment, reply)
            on_done(True)

        self._ask(
            member,
            repayment.creditor_id,
            lambda creditor: _take_back(creditor, repayment.message),
            on_returned,
            lambda: on_done(False),
        )

    # --- what must hold

    def check(self) -> None:
        """AssertionError unless every core is consistent and no block is in two hands."""
        self.ledger.check_integrity()
        for member in self.members.values():
            member.grants.check_integrity()
            member.debts.check_integrity()
            member.search.check_integrity()
            for tier in KvTier:
                pool = member.pool_of(tier)
                pool.check_integrity(member.held_of(tier))
                assert pool.withdrawn_blocks == member.grants.lent_blocks(tier)
            frozen = member.debts.in_state(BlockState.FROZEN)
            orphans = {number for number in frozen if member.debts.blocks[number].is_orphan}
            in_use = {*member.debts.in_state(BlockState.USED), *frozen} - orphans
            assert set(member.used) == in_use
            self._check_fences(member)

    def _check_fences(self, debtor: Member) -> None:
        """What a living debtor may still use, its creditor, if it lives, keeps for it and lets it touch."""
        start = debtor.worker_id, debtor.incarnation
        for key, loan in debtor.debts.grants.items():
            creditor = self.members[key.creditor_id]
            blocks = [debtor.debts.blocks[number] for number in loan.blocks.values()]
            in_hand = [block.physical for block in blocks if block.state is not BlockState.RETURNING]
            if creditor.incarnation != key.creditor_incarnation or not in_hand:
                continue
            taken = creditor.own if loan.tier is KvTier.DEVICE else ()
            assert not set(in_hand) & set(taken), "a lent block was given to the creditor's own request"
            lent = creditor.grants.enter(start, key.grant_id, loan.generation, self.now_s)
            assert lent is not None, "the creditor ended a lease before the debtor did"
            if lent == loan.generation:  # else an answer to a return is on its way, or will be asked again
                held = creditor.grants.grants_of(loan.tier, np.array(in_hand), [key.grant_id])
                assert held is not None, "the creditor took a block back before the debtor gave it"
            assert creditor.grants.leave(key.grant_id) is None


def _found(table: DebtLedger, asked: FindCreditors) -> CreditorCandidates:
    return CreditorCandidates(
        candidates=tuple(
            candidates(table, asked.debtor_id, asked.tokens, asked.refused_by, asked.refused_host_by)
        )
    )


def _take_back(creditor: Member, message: ReturnBlocks) -> BlocksReturned:
    reply, freed = creditor.grants.give_back(message)
    creditor.free([] if freed is None else [freed])
    return reply


WORKERS = 4
names = st.integers(0, WORKERS - 1)
few = st.integers(1, 6)

moves = st.one_of(
    st.tuples(st.just("beat"), names),
    st.tuples(st.just("need"), names, few),
    *[st.tuples(st.just("borrow"), names, few)] * 4,
    st.tuples(st.just("use"), names, few),
    st.tuples(st.just("stop_using"), names, few),
    st.tuples(st.just("give_back"), names, few),
    st.tuples(st.just("compute"), names, st.integers(-6, 8)),
    st.tuples(st.just("kill"), names),
    st.tuples(st.just("restart_ledger")),
    st.tuples(st.just("silence"), st.integers(1, 12)),
    st.tuples(st.just("advance"), st.sampled_from([0.1, 0.5, 1.0, 1.9])),
    *[st.tuples(st.just("deliver"), st.integers(0, 50))] * 3,
    st.tuples(st.just("lose"), st.integers(0, 50)),
)


def carry_out(world: LendingWorld, move: tuple[str, *tuple[float, ...]]) -> None:
    verb, *details = move
    if verb in ("deliver", "lose"):
        if world.letters:
            getattr(world.letters.pop(int(details[0]) % len(world.letters)), verb)()
    elif verb in ("advance", "silence", "restart_ledger"):
        getattr(world, verb)(*details)
    else:
        worker, *rest = details
        getattr(world, verb)(world.names[int(worker)], *map(int, rest))
