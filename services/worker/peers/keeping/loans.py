"""Host memory of other workers for this one's prefix cache: borrowed, renewed, returned. On the event loop.

It has debts apart from those for sequences: its slots are in no pool, no step reads them, and losing one is
only a cache miss. The cache says how much it wants (`kv.core.peer_keeping`). Decides nothing itself.
"""

import asyncio
from collections.abc import Iterator, Sequence

from services.worker.door import Door
from services.worker.kv.store import KvStore
from services.worker.kv.tiers.peers import PeerTier
from services.worker.peers.keeping.keeper import LentSlot
from services.worker.peers.keeping.ways import PeerWays, SlotPlace
from services.worker.peers.lending.core.debts import GrantKey
from services.worker.peers.lending.debtor import Debtor, Owner
from services.worker.peers.settings import LendingConfig
from shared.bus import Bus
from shared.clock import Clock
from shared.errors import KvasirError, Overloaded
from shared.liveness import Start
from shared.log import canonical, get_logger
from shared.messages.lending import Grant, KvTier

_log = get_logger("worker.keeping")
_REST_S = 2.0
"""Pause after a search that did not get everything: no request waits for it."""
_IDLE_S = 10.0
"""Time without any demand after which empty slots are returned."""


class CacheLoans:
    """Slots that one worker's prefix cache borrows. Its own debts number them, each number once."""

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
        clock: Clock,
    ) -> None:
        """`requests` numbers all questions of this worker to creditors."""
        self._cache = store.cache
        self._record_bytes = store.record_bytes
        self._tier = tier
        self._door = door
        self._ways = ways
        self._clock = clock
        self._debtor = Debtor(
            bus, config, owner, self, requests, clock, first_id=0, rest_s=_REST_S, for_cache=True
        )
        self.debts = self._debtor.debts
        self._wanted_s = clock()
        """When the cache last wanted more."""
        self.lost_blocks = 0
        """Number of slots lost since the start, by a lost creditor or an ended grant."""
        tier.memory = ways

    async def serve(self) -> None:
        """Keep leases, borrow and return, until cancelled."""
        await self._debtor.serve(self.tick)

    def close(self) -> None:
        """End all links."""
        self._ways.close()

    def section(self) -> dict[str, int]:
        """Return borrowed host blocks by creditor, for the heartbeat."""
        return self.debts.borrowed_from(KvTier.HOST)

    def details(self) -> dict[str, object]:
        """For `python -m services status`."""
        return {"cache_borrowed_blocks": self.debts.borrowed_blocks, "cache_lost_blocks": self.lost_blocks}

    async def tick(self) -> None:
        """Keep leases, then borrow or return. Does not wait for the engine: a step may outlast a lease."""
        now_s = self._clock()
        self._debtor.renew(now_s)
        self._debtor.repay(self._debtor.send)
        self.debts.give_back(self.debts.free_blocks)  # `admit` could not reach their creditor
        self._debtor.begin("look", self._look(now_s))

    async def _look(self, now_s: float) -> None:
        """Ask the cache how many blocks it wants, then borrow, or return spare ones."""
        peers = self._cache.peers
        try:
            wanted = await asyncio.wrap_future(self._door.ask(lambda core, _: peers.wanted_blocks()))
            if wanted:
                self._wanted_s = now_s
                if self._debtor.borrowing.may_start(now_s):
                    self._debtor.begin("borrow", self._borrow(wanted))
            elif now_s - self._wanted_s > _IDLE_S:
                self._wanted_s = now_s
                spare = await self._door.take(lambda core, _: peers.retire(), peers.admit)
                self._forget(spare)
                self.debts.release(spare)
                self.debts.give_back(len(spare))  # The next tick sends it.
        except Overloaded as error:
            _log.debug("the engine is not asked what its cache wants: %s", error)

    async def _borrow(self, blocks: int) -> None:
        before = self.debts.borrowed_blocks
        await self._debtor.search(blocks)
        found = self.debts.borrowed_blocks > before
        self._door.give(lambda core, _: self._cache.peers.searched(found=found))

    def _forget(self, slots: Sequence[int]) -> None:
        self._ways.forget(slots)
        self._tier.forget(slots)

    def on_failed(self, creditor: Start, grant_id: int | None) -> None:
        """Drop the slots of a creditor that failed (`grant_id` None), or of a grant that it ended."""
        if grant_id is None:
            self._debtor.lose(self.debts.on_creditor_gone(creditor[0]), f"{creditor[0]} failed")
        else:
            lost = self.debts.on_grant_over(GrantKey(*creditor, grant_id))
            self._debtor.lose(lost, f"{creditor[0]} needs them")

    # --- `LoanUser`

    async def admit(self, grant: Grant, logical: Sequence[int]) -> bool:
        """Let the cache fill these slots. False when their creditor cannot be reached."""
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

    def lose(self, logical: Sequence[int], why: str) -> None:
        """Drop slots that are gone, with their content."""
        canonical(_log, "host memory for the cache lost", blocks=len(logical), why=why)
        self.lost_blocks += len(logical)
        self._forget(logical)
        self._door.give(lambda core, _: self._cache.peers.lose(logical))
