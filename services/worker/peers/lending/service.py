"""Lending on the bus: one worker as creditor and as debtor.

`grants`, `debts` and `borrowing` decide. This runs on the event loop, so that no lease runs out
during a long iteration. Blocks leave and enter the pool on the engine's thread, through `Stock`. Knows no KV
bytes.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from services.worker.core.settings import LendingConfig
from services.worker.door import Door
from services.worker.kv.core.borrowed_pool import OwnPool
from services.worker.peers.attention.borrower import Borrower
from services.worker.peers.core.neighbours import Neighbours
from services.worker.peers.lending.core.borrowing import Balance, Marks, pressures
from services.worker.peers.lending.core.debts import Debts, Repayment
from services.worker.peers.lending.core.grants import Freed, Grants, Terms
from services.worker.peers.lending.debtor import Debtor, Owner
from services.worker.peers.lending.recalls import HANDLERS as RECALLS
from services.worker.peers.lending.recalls import Recalls
from services.worker.peers.lending.stock import Stock
from shared import subjects
from shared.bus import Bus, Endpoint, Handler
from shared.clock import Clock
from shared.log import canonical, get_logger
from shared.messages.lending import (
    BlocksReturned,
    BorrowBlocks,
    BorrowReply,
    Grant,
    KvTier,
    LeasesRenewed,
    Refusal,
    RenewLeases,
    ReturnBlocks,
)
from shared.messages.reports import Capacity

HANDLERS: tuple[Handler, ...] = (
    Endpoint(subjects.worker_borrow.to, BorrowBlocks, "borrow", concurrency=1, sender="debtor_id"),
    Endpoint(subjects.worker_renew.to, RenewLeases, "renew", sender="debtor_id"),
    Endpoint(subjects.worker_repay.to, ReturnBlocks, "take_back", sender="debtor_id"),
)

_log = get_logger("worker.lending")


def section(
    capacity: Capacity, debts: Debts, grants: Grants, spare_blocks: int, host_free_blocks: int
) -> dict[str, Any]:
    """Return the heartbeat's fields about loans, by tier. Up to `spare_blocks` of the device could be lent,
    apart from the cap."""
    device, host, terms = KvTier.DEVICE, KvTier.HOST, grants.terms
    room_blocks = terms.most_blocks - grants.lent_blocks(device)
    own = msgspec.structs.replace(
        capacity,
        lent_blocks=grants.lent_blocks(device),
        borrowed_blocks=debts.borrowed_blocks,
        most_lent_blocks=terms.most_blocks + (0 if terms.is_host_for_caches else terms.most_host_blocks),
        lendable_blocks=0 if grants.frozen else max(0, min(spare_blocks, room_blocks)),
        host_blocks=grants.host_blocks,
        host_lent_blocks=grants.lent_blocks(host),
        host_lendable_blocks=0 if grants.frozen else host_free_blocks,
        host_yielding_blocks=grants.yielding_blocks(),
        is_host_for_caches=terms.is_host_for_caches,
    )
    return {
        "capacity": own,
        "lent_to_blocks": grants.lent_to(device),
        "borrowed_from_blocks": debts.borrowed_from(device),
        "host_lent_to_blocks": grants.lent_to(host),
        "host_borrowed_from_blocks": debts.borrowed_from(host),
    }


def loans(debts: Debts, grants: Grants, cached: Mapping[str, int]) -> dict[str, object]:
    """Return the loans of both tiers for `python -m services status`. `cached`: the prefix cache's blocks by
    creditor."""
    lent_to, borrowed_from = grants.lent_to(), Counter(debts.borrowed_from())
    borrowed_from.update(cached)
    rows = [
        {"peer": peer, "lent_blocks": lent_to.get(peer, 0), "borrowed_blocks": borrowed_from.get(peer, 0)}
        for peer in sorted({*lent_to, *borrowed_from})
    ]
    return {
        "lent_blocks": sum(lent_to.values()),
        "borrowed_blocks": sum(borrowed_from.values()),
        "host_lent_blocks": grants.lent_blocks(KvTier.HOST),
        "host_borrowed_blocks": sum(debts.borrowed_from(KvTier.HOST).values()) + sum(cached.values()),
        "loans": rows,
    }


class Lending:
    """Grants, debts and the search for creditors of one worker, whose own blocks are in `pool`."""

    def __init__(
        self,
        bus: Bus,
        config: LendingConfig,
        owner: Owner,
        door: Door,
        pool: OwnPool,
        neighbours: Neighbours,
        requests: Iterator[int],
        clock: Clock,
        *,
        borrower: Borrower | None = None,
    ) -> None:
        """`requests` numbers all questions of this worker to creditors."""
        self._bus = bus
        self._config = config
        self._host = owner.host
        self._neighbours = neighbours
        self._clock = clock
        self._borrower = borrower
        ahead, host_blocks = config.borrow is True, owner.host_blocks if config.lend else 0
        marks = Marks(int(owner.blocks * config.low_fraction), int(owner.blocks * config.high_fraction))
        self._balance = Balance(marks, Capacity(total_blocks=owner.blocks, free_blocks=owner.blocks))
        self._balance.may_borrow_ahead = ahead
        own = int(owner.blocks * config.keep_free_fraction)
        self._keep_blocks = max(own, marks.middle_blocks if ahead else 0)
        """Free blocks that are not lent: a lender must not have to borrow itself."""
        usable = owner.blocks - self._keep_blocks - (0 if borrower is None else config.bounce_blocks)
        most_lent = max(0, min(usable, int(owner.blocks * config.max_lent_fraction))) if config.lend else 0
        lease = config.lease_s, config.grace_s, owner.fingerprint
        terms = Terms(most_lent, *lease, host_blocks, owner.host_attends, owner.is_host_for_caches)
        self._stock = Stock(door, pool, self._keep_blocks, host_blocks)
        own_id = owner.worker_id, owner.incarnation
        self.grants = Grants(*own_id, terms, owner.blocks, host_blocks, threading.RLock())
        self._debtor = Debtor(
            bus, config, owner, self, requests, clock, first_id=owner.ids, rest_s=config.rest_s
        )
        self.debts = self._debtor.debts
        self._recalls: Recalls | None = None
        if borrower is not None:
            parts = self.debts, self.grants, borrower, self._stock, config.bounce_blocks
            self._recalls = Recalls(*parts, self._send_repayment, clock, from_start=ahead)
        self._parted: list[Freed] = []
        """Returned blocks whose last user has left."""

    async def serve(self) -> None:
        """Keep leases, borrow and return, until cancelled."""
        await self._bus.attach(HANDLERS, self)
        if self._recalls is not None:
            await self._bus.attach(RECALLS, self._recalls)
        try:
            await self._debtor.serve(self.tick)
        finally:
            await self._bus.detach(HANDLERS, self)
            if self._recalls is not None:
                await self._bus.detach(RECALLS, self._recalls)

    def want(self, blocks: int, *, may_borrow_ahead: bool = True) -> None:
        """Set how many blocks a sequence needs in total; 0: none is waiting.

        Without such a sequence, the worker borrows at the low mark only where `may_borrow_ahead`."""
        self._balance.needed_blocks = blocks
        self._balance.may_borrow_ahead = may_borrow_ahead and self._config.borrow is True

    def section(self, capacity: Capacity) -> dict[str, Any]:
        """Return the heartbeat's fields about loans. The next tick uses this capacity."""
        self._balance.on_report(capacity)
        spare_blocks = self._balance.own_blocks - self._keep_blocks
        return section(capacity, self.debts, self.grants, spare_blocks, self._stock.host_free_blocks)

    def details(self, cached: Mapping[str, int]) -> dict[str, object]:
        """Return figures for `python -m services status`; `cached` as in `loans`."""
        recalls = {} if self._recalls is None else self._recalls.details()
        return {**loans(self.debts, self.grants, cached), **recalls}

    # --- as creditor

    async def borrow(self, asked: BorrowBlocks) -> BorrowReply:
        """Answer one request for memory, in the order of arrival."""
        await self._free(self.grants.on_incarnation(asked.debtor_id, asked.debtor_incarnation))
        answer = self.grants.answer(asked)
        if self._may_take_from_caches(asked, answer):
            await self._free(self.grants.give_way(asked.blocks - self._stock.host_free_blocks))
            answer = self.grants.answer(asked)
        if not isinstance(answer, int):
            return answer
        blocks = await self._stock.take(asked.tier, answer, asked.least_blocks)
        reply = self.grants.lend(asked, blocks, self._clock())
        counts = {"asked": asked.blocks, "granted": len(blocks), "tier": str(asked.tier)}
        canonical(_log, "asked to lend", debtor=asked.debtor_id, **counts)
        return reply

    @staticmethod
    def _may_take_from_caches(asked: BorrowBlocks, answer: BorrowReply | int) -> bool:
        """Return whether a sequence asks for more host memory than is free."""
        if asked.tier is not KvTier.HOST or asked.for_cache:
            return False
        return answer < asked.blocks if isinstance(answer, int) else answer.refusal is Refusal.AT_CAP

    async def renew(self, asked: RenewLeases) -> LeasesRenewed:
        await self._free(self.grants.on_incarnation(asked.debtor_id, asked.debtor_incarnation))
        return self.grants.renew(asked, self._clock(), short_blocks=self._balance.short_blocks)

    async def take_back(self, asked: ReturnBlocks) -> BlocksReturned:
        reply, freed = self.grants.give_back(asked)
        await self._free([] if freed is None else [freed])
        return reply

    async def _free(self, freed: Sequence[Freed]) -> None:
        parted, self._parted = self._parted, []
        await self._stock.put_back([*parted, *freed], self._kept)

    def _kept(self, blocks: Sequence[int]) -> list[int]:
        """Keep what is needed as bounce blocks; return the rest."""
        recalls = self._recalls
        return list(blocks) if recalls is None else recalls.keep(blocks) + recalls.take_spare()

    def free_later(self, freed: Freed) -> None:
        """Free blocks that were in use when they were returned, or when their grant ended."""
        self._parted.append(freed)
        self._debtor.begin("free", self._free([]))

    # --- as debtor

    async def tick(self) -> None:
        """End leases that ran out, renew those that are due, and borrow or return."""
        now_s = self._clock()
        expired = self.grants.tick(now_s)
        if expired:
            canonical(_log, "leases over", blocks=sum(len(part.blocks) for part in expired))
        await self._free(expired)
        self._debtor.renew(now_s)
        if self._config.borrow:
            self._even_out(now_s)
        if self._recalls is not None:
            await self._recalls.tick()
            if self._recalls.is_swapping:
                return
        self._debtor.repay(self._send_repayment)

    def _even_out(self, now_s: float) -> None:
        """Borrow, or return blocks one step at a time."""
        idle = self.debts.free_blocks
        handed = self.debts.borrowed_blocks - idle
        usable = 0 if self._borrower is not None else idle  # Its sequences get none of these.
        missing = self._balance.lacks(handed, usable)
        if missing and self._debtor.borrowing.may_start(now_s):
            self._debtor.begin("borrow", self._debtor.search(missing))
        back = self._balance.spares(handed, usable, sum(self.debts.wanted_back().values()))
        self.debts.give_back(back if self._borrower is None else idle)
        if self._borrower is not None and self._balance.may_shrink():
            is_spacious = self._balance.own_blocks > self._balance.keep_blocks
            recalls = self._recalls if is_spacious and self._config.recall else None
            if recalls is not None and not recalls.may_recall():
                recalls = None
            if back or recalls is not None:
                self._debtor.begin("shrink", self._shrink(self._borrower, recalls, back))

    async def _shrink(self, borrower: Borrower, recalls: Recalls | None, blocks: int) -> None:
        """Recall blocks in use, then return up to `blocks` free ones.

        Cached blocks count as free when nothing came home."""
        home = 0
        if recalls is not None:
            of = pressures(self._neighbours, self._host, self.debts.wanted_back())
            home = await recalls.recall(of, self._balance.own_blocks, self._balance.keep_blocks)
        if blocks:
            self.debts.release(await borrower.retire(blocks, cached=not home))
        self._balance.on_shrunk()

    def on_creditor_failed(self, creditor_id: str) -> None:
        """Give up a creditor that failed in the middle of a step."""
        self._debtor.lose(self.debts.on_creditor_gone(creditor_id), f"{creditor_id} failed")

    async def _send_repayment(self, repayment: Repayment) -> bool:
        """Return blocks; report whether the creditor confirmed."""
        reply = await self._debtor.send(repayment)
        if reply is not None and self._borrower is not None:
            self._borrower.rename(repayment.grant, reply.generation)
        return reply is not None

    # --- `LoanUser`

    async def admit(self, grant: Grant, logical: Sequence[int]) -> bool:
        """Let sequences use blocks. Without a borrower, they stay free."""
        return self._borrower is not None and await self._borrower.admit(grant, logical)

    def lose(self, logical: Sequence[int], why: str) -> None:
        """Drop blocks that are lost with their lease or creditor."""
        canonical(_log, "borrowed blocks lost", blocks=len(logical), why=why)
        if self._recalls is not None:
            self._recalls.on_lost(logical)
        if self._borrower is not None:
            self._borrower.lose(logical)
