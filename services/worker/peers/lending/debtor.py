"""The debtor's messages on the bus: its search for creditors, renewals and returns.

It serves loans for sequences (`lending.service`) and for the prefix cache (`peers.keeping`). The decisions
are in `debts` and `borrowing`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from services.worker.core.settings import LendingConfig
from services.worker.peers.lending.core.borrowing import AskCreditor, Borrowing, CreditorQuestion, is_answer
from services.worker.peers.lending.core.debts import Debts, Renewal, Repayment
from shared import subjects
from shared.bus import Bus, fenced
from shared.clock import Clock
from shared.errors import KvasirError
from shared.log import canonical, get_logger
from shared.messages.commands import CreditorCandidates, FindCreditors
from shared.messages.lending import BlocksReturned, BorrowReply, Grant, LeasesRenewed

_log = get_logger("worker.lending")
_ANSWER_S = 2.0
_TICKS_IN_A_LEASE = 20
R = TypeVar("R", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Owner:
    """The worker that owns the memory, and how much it has."""

    worker_id: str
    incarnation: int
    blocks: int
    """Device blocks."""
    ids: int
    """Upper bound of its own block ids, in any memory."""
    block_tokens: int
    fingerprint: bytes
    host: str = ""
    host_blocks: int = 0
    """Host blocks, for other workers only."""
    host_attends: bool = True
    """It computes attention over its host blocks."""
    is_host_for_caches: bool = False
    """Its host blocks serve other workers' prefix caches only."""


class LoanUser(Protocol):
    """User of borrowed blocks, on the event loop."""

    async def admit(self, grant: Grant, logical: Sequence[int]) -> bool:
        """Start to use blocks of a grant. False when their creditor cannot be reached."""
        ...

    def lose(self, logical: Sequence[int], why: str) -> None:
        """Drop lost blocks."""
        ...


class Debtor:
    """Debts of one worker, for one user of the blocks.

    Its questions under way have names; an unanswered one is not repeated."""

    def __init__(
        self,
        bus: Bus,
        config: LendingConfig,
        owner: Owner,
        user: LoanUser,
        requests: Iterator[int],
        clock: Clock,
        *,
        first_id: int,
        rest_s: float,
        for_cache: bool = False,
    ) -> None:
        self._bus = bus
        self._lease_s = config.lease_s
        self._user = user
        self._clock = clock
        self.debts = Debts(owner.worker_id, first_id, owner.incarnation)
        self.borrowing = Borrowing(
            owner.worker_id,
            owner.incarnation,
            owner.block_tokens,
            owner.fingerprint,
            requests,
            rest_s=rest_s,
            for_cache=for_cache,
        )
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
        """Run `work`, unless one of that name is under way."""
        if self._tasks is None or name in self._open:
            work.close()
            return
        self._open.add(name)
        self._tasks.create_task(work).add_done_callback(lambda _: self._open.discard(name))

    # --- search

    async def search(self, blocks: int) -> None:
        """Ask until that many blocks are granted, or no creditor is left."""
        question: CreditorQuestion | None = self.borrowing.start(blocks)
        while question is not None:
            if isinstance(question, AskCreditor):
                question = await self._ask_creditor(question)
            else:
                question = await self._ask_ledger(question)

    async def _ask_ledger(self, question: FindCreditors) -> CreditorQuestion | None:
        subject = subjects.ledger_candidates(question.debtor_id)
        answer = await self._answer(subject, question, CreditorCandidates)
        if answer is None:
            self.borrowing.on_no_ledger(self._clock())
            return None
        return self.borrowing.on_candidates(answer, self._clock())

    async def _ask_creditor(self, asked: AskCreditor) -> CreditorQuestion | None:
        sent_s, creditor, question = self._clock(), asked.creditor_id, asked.question
        subject = subjects.worker_borrow(creditor, question.debtor_id)
        reply = await self._answer(subject, question, BorrowReply)
        if reply is not None and reply.grant is not None:
            if is_answer(reply.grant, asked):
                await self._admit(reply.grant, self.debts.on_granted(reply.grant, sent_s))
                blocks = len(reply.grant.blocks)
                self._bus.recorder.note("borrowed", creditor=creditor, blocks=blocks)
                canonical(_log, "borrowed", creditor=creditor, blocks=blocks)
            else:
                _log.warning("%s granted other blocks than asked for", creditor)
                reply = None
        return self.borrowing.on_reply(creditor, reply, self._clock())

    async def _admit(self, grant: Grant, logical: Sequence[int]) -> None:
        if not logical:
            return
        self.debts.use(logical)
        if not await self._user.admit(grant, logical):
            self.debts.release(logical)
        elif lost := [number for number in logical if number not in self.debts.blocks]:
            self._user.lose(lost, f"{grant.creditor_id} failed while it was dialled")

    # --- leases and returns

    def renew(self, now_s: float) -> None:
        """Report leases that ran out as lost, and ask to renew those that are due."""
        self.lose(self.debts.tick(now_s), "leases not renewed in time")
        for due in self.debts.renewals(now_s):
            self.begin(f"renew {due.creditor_id}", self._renew(due))

    def lose(self, logical: Sequence[int], why: str) -> None:
        """Report blocks that left the debts, if any."""
        if logical:
            self._user.lose(logical, why)

    def repay(self, send: Callable[[Repayment], Coroutine[Any, Any, object]]) -> None:
        """Send the returns that no creditor has confirmed yet."""
        for repayment in self.debts.retries():
            self.begin(f"repay {repayment.creditor_id} {repayment.message.grant_id}", send(repayment))

    async def send(self, repayment: Repayment) -> BlocksReturned | None:
        """Return blocks to a creditor. None when the creditor has not confirmed."""
        creditor, message = repayment.creditor_id, repayment.message
        subject = subjects.worker_repay(creditor, message.debtor_id)
        reply = await self._answer(subject, message, BlocksReturned)
        if reply is not None:
            self.debts.on_returned(repayment, reply)
        return reply

    async def _renew(self, due: Renewal) -> None:
        sent_s, creditor, message = self._clock(), due.creditor_id, due.message
        subject = subjects.worker_renew(creditor, message.debtor_id)
        reply = await self._answer(subject, message, LeasesRenewed, min(_ANSWER_S, self._lease_s / 2))
        if reply is not None:
            self.lose(self.debts.on_renewed(due, reply, sent_s), f"{creditor} no longer knows them")

    async def _answer(
        self, subject: str, question: msgspec.Struct, answer: type[R], deadline_s: float = _ANSWER_S
    ) -> R | None:
        """Return the answer; None when there is none."""
        try:
            return await self._bus.request(subject, question, answer, deadline_s=deadline_s)
        except KvasirError as error:
            _log.debug("no answer on %s: %s", subject, error)
            return None
