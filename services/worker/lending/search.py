"""The search for creditors on the bus: asks whom `borrowing` says, and enters what is granted.

Decides nothing. One search at a time; on the event loop.
"""

from collections.abc import Sequence

from services.worker.lending.borrowing import AskCreditor, AskLedger, Borrowing, Question, is_answer
from services.worker.lending.debts import Debts
from services.worker.lending.parties import Borrower
from shared import subjects
from shared.bus import Bus
from shared.clock import Clock
from shared.errors import KvasirError
from shared.log import canonical, get_logger
from shared.messages.commands import CreditorCandidates
from shared.messages.lending import BorrowReply, Grant

ANSWER_DEADLINE_S = 2.0

_log = get_logger("worker.lending")


class Search:
    """Of one worker. `borrower` uses what is granted; None: nobody does."""

    def __init__(
        self, bus: Bus, debts: Debts, borrowing: Borrowing, borrower: Borrower | None, clock: Clock
    ) -> None:
        self._bus = bus
        self._debts = debts
        self._borrowing = borrowing
        self._borrower = borrower
        self._clock = clock

    def may_start(self, now_s: float) -> bool:
        return self._borrowing.may_start(now_s)

    async def run(self, blocks: int) -> None:
        """Until so many are granted, or nobody lends any more."""
        question: Question | None = self._borrowing.start(blocks)
        while question is not None:
            if isinstance(question, AskLedger):
                question = await self._ask_ledger(question)
            else:
                question = await self._ask_creditor(question)

    async def _ask_ledger(self, question: AskLedger) -> Question | None:
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

    async def _ask_creditor(self, question: AskCreditor) -> Question | None:
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
            _log.warning("%s granted what nobody asked for", question.creditor_id)
            reply = None
        if reply is not None and reply.grant is not None:
            await self._admit(reply.grant, self._debts.on_granted(reply.grant, sent_s))
            canonical(_log, "borrowed", creditor=question.creditor_id, blocks=len(reply.grant.blocks))
        return self._borrowing.on_reply(question.creditor_id, reply, self._clock())

    async def _admit(self, grant: Grant, logical: Sequence[int]) -> None:
        if self._borrower is None or not logical:
            return
        self._debts.use(logical)
        if not await self._borrower.admit(grant, logical):
            self._debts.release(logical)
        elif lost := [number for number in logical if not self._debts.holds(number)]:
            self._borrower.lose(lost)  # Their lease ended, or their creditor failed, while it was dialled.
