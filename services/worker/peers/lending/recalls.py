"""Brings borrowed KV home, on the bus: this worker's part in settlements, and recalls into free memory.

`settling` and `borrowing` decide. `Borrower` copies bytes and exchanges blocks on the engine's thread;
everything here runs on the event loop. At most one settlement or recall runs at a time.
Source: papers/001 §4.5; `algorithms.md` §4 (DGFM).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from services.worker.peers.attention.borrower import Borrower
from services.worker.peers.lending.core.borrowing import CreditorPressure, in_order
from services.worker.peers.lending.core.debts import Debts, Repayment
from services.worker.peers.lending.core.grants import Grants
from services.worker.peers.lending.core.settling import Copy, Settling, Swap
from services.worker.peers.lending.stock import Stock
from shared import subjects
from shared.bus import Endpoint, Handler
from shared.clock import Clock
from shared.errors import CreditorLost, Overloaded
from shared.log import canonical, get_logger
from shared.messages.lending import KvTier, Settle, Settled, SettlePhase

HANDLERS: tuple[Handler, ...] = (Endpoint(subjects.worker_settle, Settle, "settle", concurrency=1),)
_BOUNCE_S = 1.0
"""Wait for returned memory that is still being read."""
_READY_S = 0.5
"""Wait for the end of a recall, or for bounce blocks, before a settlement begins."""
MOST_RECALLED_BLOCKS = 16
"""Most blocks of one recall: those written meanwhile are fetched again between two steps."""

_log = get_logger("worker.recalls")


class Recalls:
    """Settlements and recalls of one worker that borrows.

    It keeps `bounce_blocks` of its own to copy into: always where `from_start`, else while it owes blocks.
    `repay` returns blocks to a creditor, and whether the creditor confirmed."""

    def __init__(
        self,
        debts: Debts,
        grants: Grants,
        borrower: Borrower,
        stock: Stock,
        bounce_blocks: int,
        repay: Callable[[Repayment], Awaitable[bool]],
        clock: Clock,
        *,
        from_start: bool = True,
    ) -> None:
        self._debts = debts
        self._borrower = borrower
        self._stock = stock
        self._most_bounce_blocks, self._from_start = bounce_blocks, from_start
        self._repay = repay
        self._clock = clock
        self._core = Settling(debts, grants)
        self._apart: frozenset[int] = frozenset()
        self._spare: list[int] = []
        self._filled = asyncio.Event()
        self._copying: asyncio.Future[bool] | None = None
        """The copy into bounce blocks under way. They stay reserved until it ends."""
        self._recall_over = asyncio.Event()
        self._recall_over.set()
        self.is_swapping = False
        """Sequences may still read borrowed blocks: nothing may be returned meanwhile."""
        self.settled_blocks = 0
        """Blocks that settlements brought home since the start."""
        self.recalled_blocks = 0
        """Blocks recalled into free memory since the start."""

    @property
    def _bounce_blocks(self) -> int:
        """Number of bounce blocks wanted now."""
        return self._most_bounce_blocks if self._from_start or self._debts.blocks else 0

    def details(self) -> dict[str, object]:
        """For `python -m services status`."""
        return {
            "bounce_blocks": len(self._core.bounce),
            "is_settling": self._core.is_on,
            "settled_blocks": self.settled_blocks,
            "recalled_blocks": self.recalled_blocks,
        }

    # --- bounce blocks

    def keep(self, withdrawn: Sequence[int]) -> list[int]:
        """Take own blocks that came back as bounce blocks; return those that are not needed."""
        missing = max(0, self._bounce_blocks - len(self._core.bounce))
        self._core.bounce += withdrawn[:missing]
        if missing:
            self._filled.set()
        return list(withdrawn[missing:])

    def take_spare(self) -> list[int]:
        """Return withdrawn blocks that are no longer needed."""
        spare, self._spare = self._spare, []
        return spare

    async def tick(self) -> None:
        """Expire settlements, and keep the wanted number of bounce blocks."""
        self._core.tick(self._clock())
        self._rejoin()
        missing = self._bounce_blocks - len(self._core.bounce)
        if missing < 0 and not self._core.is_on and self._copying is None:
            self._spare += self._core.bounce
            self._core.bounce = []
        if missing > 0:
            try:
                lent = await self._stock.lend(missing, 1, 0)
                self._spare += self.keep(lent)  # In two statements: `+=` would read the list before the wait.
            except Overloaded as error:
                _log.debug("no bounce blocks: %s", error)

    def on_lost(self, logical: Sequence[int]) -> None:
        """Give up blocks that are lost with their creditor."""
        self._core.on_lost(list(logical))
        self._rejoin()

    # --- settlements

    async def settle(self, asked: Settle) -> Settled:
        """Do one phase of a settlement. Raises CreditorLost and Overloaded when it was not done."""
        if self._copying is not None:
            await asyncio.wait({self._copying})  # Of an earlier message: its result does not matter here.
        if asked.phase is SettlePhase.FREEZE:
            return await self._freeze(asked)
        if asked.phase is SettlePhase.COPY:
            await self._await_bounce(asked.blocks, _BOUNCE_S, is_on=True)
        outcome = self._core.on_settle(asked, self._clock())
        if isinstance(outcome, Copy):
            whole = await asyncio.shield(self._begin_copy(outcome))
            return self._core.on_copied(asked, whole=whole)
        if isinstance(outcome, Swap):
            return await self._swap(outcome)
        self._rejoin()
        return outcome

    def _begin_copy(self, copy: Copy) -> "asyncio.Future[bool]":
        """Start a copy that runs to its end even when the caller is cancelled."""
        self._copying = copying = asyncio.ensure_future(self._borrower.copy_home(copy.pairs))

        def over(done: "asyncio.Future[bool]") -> None:
            self._copying = None
            if not done.cancelled():
                done.exception()  # Marks it as retrieved.

        copying.add_done_callback(over)
        return copying

    async def _freeze(self, asked: Settle) -> Settled:
        chosen: list[int] = []
        await self._await_bounce(1, _READY_S, is_on=False)
        if self.may_recall():
            used = self._debts.used_at(asked.creditor_id, KvTier.DEVICE)
            chosen = await self._borrower.set_apart(used, asked.blocks)
        answer = self._core.on_settle(asked, self._clock(), chosen)
        assert isinstance(answer, Settled)
        self._apart |= frozenset(chosen)
        self._rejoin()
        return answer

    async def _swap(self, swap: Swap) -> Settled:
        own = [block for _, block in swap.pairs]
        self.is_swapping = True
        try:
            spare = await self._borrower.swap_home(swap.pairs)
        except Exception:
            self._spare += self.keep(own)
            raise
        finally:
            self.is_swapping = False
        self._spare += self.keep(own if spare is None else spare)
        self._rejoin()
        if spare is None:
            raise CreditorLost("the blocks to settle are lost with their creditor", creditor_id="")
        self.settled_blocks += len(own) - len(spare)
        canonical(_log, "settled", settlement=swap.answer.settlement, blocks=len(own))
        confirmed = await asyncio.gather(*(self._repay(each) for each in swap.repayments))
        if not all(confirmed):
            raise CreditorLost("a creditor has not confirmed the returned blocks", creditor_id="")
        return swap.answer

    async def _await_bounce(self, blocks: int, timeout_s: float, *, is_on: bool) -> None:
        """Wait for a recall to end, and for bounce blocks that are still used or read, while a settlement
        `is_on`, or none is."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._recall_over.wait()
                while self._core.is_on is is_on and len(self._core.bounce) < min(blocks, self._bounce_blocks):
                    self._filled.clear()
                    await self._filled.wait()
        except TimeoutError:
            _log.debug("no bounce blocks in time")

    def _rejoin(self) -> None:
        """Rejoin, in the engine, the blocks that the settlement no longer holds."""
        over = self._apart - self._core.frozen
        if over and not self.is_swapping:
            self._borrower.rejoin(sorted(over))
            self._apart -= over

    # --- repayment

    def may_recall(self) -> bool:
        return not self._core.is_on and self._recall_over.is_set()

    async def recall(
        self, pressures: Mapping[str, CreditorPressure], free_blocks: int, keep_blocks: int
    ) -> int:
        """Bring blocks home into free memory, from the creditors under most pressure; return how many.

        All borrowed blocks are offered: only the engine's thread knows which of them a sequence uses."""
        order = in_order(self._debts.lenders(), pressures)
        chosen = [number for lender in order for number in self._debts.used_at(*lender)]
        most = min(MOST_RECALLED_BLOCKS, free_blocks - keep_blocks)
        if not chosen or most < 1:
            return 0
        self._recall_over.clear()
        self._debts.freeze(chosen)
        home: Iterable[int] = ()
        try:
            home = await self._borrower.recall(chosen, most, keep_blocks)
        finally:
            self._recall_over.set()
            repayments = self._debts.recalled(home)
            self._debts.thaw(chosen)
        count = sum(len(each.message.blocks) for each in repayments)
        self.recalled_blocks += count
        if repayments:
            canonical(_log, "brought home", blocks=count)
        for each in repayments:
            await self._repay(each)
        return count
