"""Host memory of other workers for this one's prefix cache: borrowed, renewed, returned. On the event loop.

A debtor beside the one that borrows for sequences, with debts of its own: what a cache has is in no pool, no
step reads it, and its loss is a miss. The rules are those of `peers.lending`; how much is wanted the cache
says (`kv.core.peer_keeping`), on the engine's thread. Decides nothing.
"""

import asyncio
from collections.abc import Iterator, Sequence

from services.worker.door import Door
from services.worker.kv.store import KvStore
from services.worker.kv.tiers.peers import PeerTier
from services.worker.peers.keeping.keeper import LentSlot
from services.worker.peers.keeping.ways import PeerWays, SlotPlace
from services.worker.peers.lending.core.borrowing import Borrowing, Manners
from services.worker.peers.lending.core.debts import Debts
from services.worker.peers.lending.core.interfaces import Owner
from services.worker.peers.lending.core.settings import LendingConfig
from services.worker.peers.lending.core.table import GrantKey, RBlockTable
from services.worker.peers.lending.debtor import Errands, Search, send_repayment
from shared.bus import Bus
from shared.clock import Clock, monotonic_s
from shared.errors import KvasirError, Overloaded
from shared.liveness import Start
from shared.log import canonical, get_logger
from shared.messages.lending import Grant, KvTier

_log = get_logger("worker.keeping")
_REST_S = 2.0
"""After a search that did not get everything: nobody waits for it."""
_IDLE_S = 10.0
"""For so long nothing is in a slot, and nothing wants one, before it is returned."""


class CacheLoans:
    """One worker's. Slots are numbered by its own table, each number once."""

    def __init__(
        self,
        bus: Bus,
        config: LendingConfig,
        owner: Owner,
        store: KvStore,
        tier: PeerTier,
        door: Door,
        ways: PeerWays,
        requests: Iterator[int],
        clock: Clock = monotonic_s,
    ) -> None:
        """`requests` numbers what this worker asks of creditors, for whatever purpose."""
        self._bus = bus
        self._cache = store.cache
        self._record_bytes = store.record_bytes
        self._tier = tier
        self._door = door
        self._ways = ways
        self._clock = clock
        self.table = RBlockTable(owner.worker_id, 0, local_ids=0)
        self.debts = Debts(self.table, owner.incarnation)
        borrowing = Borrowing(
            owner.worker_id,
            owner.incarnation,
            owner.block_tokens,
            owner.fingerprint,
            Manners(config.most_rounds, _REST_S),
            requests,
            for_cache=True,
        )
        self._search = Search(bus, self.debts, borrowing, self, clock)
        self._errands = Errands(bus, self.debts, config.lease_s, self._lose, clock)
        self._wanted_s = clock()
        """When more was wanted the last time."""
        self.lost_blocks = 0
        """Slots, since the start, whose creditor is gone or has ended the grant."""
        tier.memory = ways

    async def serve(self) -> None:
        """Keeps leases, borrows and returns, until cancelled."""
        await self._errands.serve(self.tick)

    def close(self) -> None:
        """Ends all links."""
        self._ways.close()

    def section(self) -> dict[str, int]:
        """Of the heartbeat: blocks in host memory, by creditor."""
        return self.table.borrowed_from(KvTier.HOST)

    def details(self) -> dict[str, object]:
        """For `python -m services status`."""
        return {"cache_borrowed_blocks": self.debts.borrowed_blocks, "cache_lost_blocks": self.lost_blocks}

    async def tick(self) -> None:
        """Renews leases that are due, gives up those that ran out, borrows or returns. Does not wait for the
        engine, whose step may be longer than a lease."""
        now_s = self._clock()
        self._errands.renew(now_s)
        self._errands.repay(lambda repayment: send_repayment(self._bus, self.debts, repayment))
        self.debts.give_back(self.debts.free_blocks)  # their creditor could not be reached
        self._errands.begin("look", self._look(now_s))

    async def _look(self, now_s: float) -> None:
        """Asks the cache what it wants."""
        try:
            wanted = await asyncio.wrap_future(
                self._door.ask(lambda core, _: self._cache.peers.wanted_blocks())
            )
            if wanted:
                self._wanted_s = now_s
                if self._search.may_start(now_s):
                    self._errands.begin("borrow", self._borrow(wanted))
            elif now_s - self._wanted_s > _IDLE_S:
                self._wanted_s = now_s
                await self._return_spare()
        except Overloaded as error:
            _log.debug("the engine is not asked what its cache wants: %s", error)

    # --- `LoanUser`

    async def admit(self, grant: Grant, logical: Sequence[int]) -> bool:
        """These may be filled from now on."""
        creditor = (grant.creditor_id, grant.creditor_incarnation)
        places = {
            number: SlotPlace(creditor, LentSlot(grant.grant_id, grant.generation, physical))
            for number, physical in zip(logical, grant.blocks, strict=True)
        }
        try:
            block_s = await self._ways.reach(places[logical[0]], self._record_bytes)
        except KvasirError as error:
            _log.warning("host memory of %s cannot be used: %s", grant.creditor_id, error)
            return False
        self._ways.admit(places)
        peers = self._cache.peers
        await asyncio.wrap_future(self._door.give(lambda core, _: peers.admit(logical, block_s)))
        return True

    def lose(self, logical: Sequence[int]) -> None:
        """These are gone, with what was in them."""
        self.lost_blocks += len(logical)
        self._ways.forget(logical)
        self._tier.forget(logical)
        self._door.give(lambda core, _: self._cache.peers.lose(logical))

    def on_failed(self, creditor: Start, grant_id: int | None) -> None:
        """It did not answer, or has ended that grant."""
        if grant_id is None:
            lost = self.debts.on_creditor_gone(creditor[0])
        else:
            lost = self.debts.on_grant_over(GrantKey(*creditor, grant_id))
        self._lose(lost, f"{creditor[0]} failed" if grant_id is None else f"{creditor[0]} needs them")

    async def _borrow(self, blocks: int) -> None:
        before = self.debts.borrowed_blocks
        await self._search.run(blocks)
        found = self.debts.borrowed_blocks > before
        self._door.give(lambda core, _: self._cache.peers.searched(found=found))

    async def _return_spare(self) -> None:
        """What nothing is in."""
        spare = await self._door.take(lambda core, _: self._cache.peers.retire(), self._cache.peers.admit)
        self._ways.forget(spare)
        self._tier.forget(spare)
        self.debts.release(spare)
        self.debts.give_back(len(spare))  # the tick sends it

    def _lose(self, logical: Sequence[int], why: str) -> None:
        if logical:
            canonical(_log, "host memory for the cache lost", blocks=len(logical), why=why)
            self.lose(logical)
