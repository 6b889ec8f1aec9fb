"""The debtor's messages on the bus: its search for creditors, renewals and returns.

It serves loans for sequences (`lending.service`) and for the prefix cache (`peers.keeping`). The decisions
are in `debts` and `borrowing`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from services.worker.peers.lending.core.borrowing import (
    AskCreditor,
    AskLedger,
    Borrowing,
    CreditorQuestion,
    is_answer,
)
from services.worker.peers.lending.core.debts import Debts, Renewal, Repayment
from services.worker.peers.lending.core.interfaces import LoanUser
from shared import subjects
from shared.bus import Bus, fenced
from shared.clock import Clock
from shared.errors import KvasirError
from shared.log import canonical, get_logger
from shared.messages.commands import CreditorCandidates
from shared.messages.lending import BlocksReturned, BorrowReply, Grant, LeasesRenewed

_log = get_logger("worker.lending")
ANSWER_DEADLINE_S = 2.0
_TICKS_IN_A_LEASE = 20


class Search:
    """Search of one worker for creditors. `borrower` uses the granted blocks; None: nothing does."""

    def __init__(
        self, bus: Bus, debts: Debts, borrowing: Borrowing, borrower: LoanUser | None, clock: Clock
    ) -> None:
        self._bus = bus
        self._debts = debts
        self._borrowing = borrowing
        self._borrower = borrower
        self._clock = clock

    def may_start(self, now_s: float) -> bool:
        return self._borrowing.may_start(now_s)

    async def run(self, blocks: int) -> None:
        """Ask until that many blocks are granted, or no creditor is left."""
        question: CreditorQuestion | None = self._borrowing.start(blocks)
        while question is not None:
            if isinstance(question, AskLedger):
                question = await self._ask_ledger(question)
            else:
                question = await self._ask_creditor(question)

    async def _ask_ledger(self, question: AskLedger) -> CreditorQuestion | None:
        try:
            answer = await self._bus.request(
                subjects.ledger_candidates(question.question.debtor_id),
                question.question,
                CreditorCandidates,
                deadline_s=ANSWER_DEADLINE_S,
            )
        except KvasirError as error:
            _log.debug("no ledger: %s", error)
            self._borrowing.on_no_ledger(self._clock())
            return None
        return self._borrowing.on_candidates(answer, self._clock())

    async def _ask_creditor(self, question: AskCreditor) -> CreditorQuestion | None:
        sent_s = self._clock()
        reply: BorrowReply | None = None
        try:
            reply = await self._bus.request(
                subjects.worker_borrow(question.creditor_id, question.question.debtor_id),
                question.question,
                BorrowReply,
                deadline_s=ANSWER_DEADLINE_S,
            )
        except KvasirError as error:
            _log.debug("%s did not answer: %s", question.creditor_id, error)
        if reply is not None and reply.grant is not None and not is_answer(reply.grant, question):
            _log.warning("%s granted other blocks than asked for", question.creditor_id)
            reply = None
        if reply is not None and reply.grant is not None:
            await self._admit(reply.grant, self._debts.on_granted(reply.grant, sent_s))
            self._bus.recorder.note("borrowed", creditor=question.creditor_id, blocks=len(reply.grant.blocks))
            canonical(_log, "borrowed", creditor=question.creditor_id, blocks=len(reply.grant.blocks))
        return self._borrowing.on_reply(question.creditor_id, reply, self._clock())

    async def _admit(self, grant: Grant, logical: Sequence[int]) -> None:
        if self._borrower is None or not logical:
            return
        self._debts.use(logical)
        if not await self._borrower.admit(grant, logical):
            self._debts.release(logical)
        elif lost := [number for number in logical if not self._debts.holds(number)]:
            self._borrower.lose(lost)  # Lost while the creditor was dialled.


async def send_repayment(bus: Bus, debts: Debts, repayment: Repayment) -> BlocksReturned | None:
    """Return blocks to a creditor. None when the creditor has not confirmed."""
    try:
        reply = await bus.request(
            subjects.worker_repay(repayment.creditor_id, repayment.message.debtor_id),
            repayment.message,
            BlocksReturned,
            deadline_s=ANSWER_DEADLINE_S,
        )
    except KvasirError as error:
        _log.debug("%s took nothing back: %s", repayment.creditor_id, error)
        return None
    debts.on_returned(repayment, reply)
    return reply


class Errands:
    """Questions of one debtor under way, at most one of a name: an unanswered one is not repeated."""

    def __init__(
        self,
        bus: Bus,
        debts: Debts,
        lease_s: float,
        on_lost: Callable[[Sequence[int], str], None],
        clock: Clock,
    ) -> None:
        """`on_lost` gets the logical blocks whose lease ended, and why."""
        self._bus = bus
        self._debts = debts
        self._lease_s = lease_s
        self._on_lost = on_lost
        self._clock = clock
        self._tasks: asyncio.TaskGroup | None = None
        """None: nothing is begun."""
        self._open: set[str] = set()

    async def serve(self, tick: Callable[[], Awaitable[None]]) -> None:
        """Call `tick` several times a lease, until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                while True:
                    await asyncio.sleep(self._lease_s / _TICKS_IN_A_LEASE)
                    with fenced("lending tick"):
                        await tick()
        finally:
            self._tasks = None

    def begin(self, name: str, work: Coroutine[Any, Any, object]) -> None:
        """Run `work`, unless an errand of that name is under way."""
        if self._tasks is None or name in self._open:
            work.close()
            return
        self._open.add(name)
        self._tasks.create_task(work).add_done_callback(lambda _: self._open.discard(name))

    def renew(self, now_s: float) -> None:
        """Report leases that ran out as lost, and ask to renew those that are due."""
        self._on_lost(self._debts.tick(now_s), "leases not renewed in time")
        for due in self._debts.renewals(now_s):
            self.begin(f"renew {due.creditor_id}", self._renew(due))

    def repay(self, send: Callable[[Repayment], Coroutine[Any, Any, object]]) -> None:
        """Send the returns that no creditor has confirmed yet."""
        for repayment in self._debts.retries():
            self.begin(f"repay {repayment.creditor_id} {repayment.message.grant_id}", send(repayment))

    async def _renew(self, due: Renewal) -> None:
        sent_s = self._clock()
        try:
            reply = await self._bus.request(
                subjects.worker_renew(due.creditor_id, due.message.debtor_id),
                due.message,
                LeasesRenewed,
                deadline_s=min(ANSWER_DEADLINE_S, self._lease_s / 2),
            )
        except KvasirError as error:
            _log.debug("%s renewed nothing: %s", due.creditor_id, error)
            return
        lost = self._debts.on_renewed(due, reply, sent_s)
        self._on_lost(lost, f"{due.creditor_id} no longer knows them")
