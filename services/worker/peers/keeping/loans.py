"""Host memory lent to prefix caches: the creditor's side (`Keeper`), and the debtor's, which borrows,
renews and returns.

The debtor has debts apart from those for sequences: its slots are in no pool, no step reads them, and losing
one is only a cache miss. The cache says how much it wants (`PeerKeeping`). Decides nothing itself.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

import msgspec
import numpy as np

from services.worker.core.settings import LendingConfig
from services.worker.door import Door
from services.worker.kv.store import CacheableEngine, KvStore
from services.worker.kv.tiers.host import PeerTier
from services.worker.kv.tiers.records import RecordRow, Records
from services.worker.peers.attention.creditor import LentGrants
from services.worker.peers.attention.interfaces import LentBlocks
from services.worker.peers.attention.messages import GrantRef
from services.worker.peers.lending.core.debts import GrantKey
from services.worker.peers.lending.debtor import Debtor, Owner
from services.worker.peers.registry import Registry
from services.worker.peers.transport.base import Buffer, Peer, Receiver, Reception, Reply, bytes_of
from services.worker.peers.transport.link import PeerLink
from shared.bus import Bus
from shared.clock import Clock
from shared.errors import DeadlineExceeded, InvalidMessage, KvasirError, Overloaded, PeerLost, StaleEpoch
from shared.liveness import Start
from shared.log import canonical, get_logger
from shared.messages.base import decode
from shared.messages.lending import Grant, KvTier

KEEP, KEPT = "kv.keep", "kv.kept"


class LentSlot(msgspec.Struct, frozen=True, array_like=True):
    """Header of both messages: one block of the creditor's host memory, and its grant."""

    grant_id: int
    generation: int
    block: int


class Keeper:
    """Host memory that one worker lends, as rows of `records`. `receivers` are for its bulk desk.

    `kv.keep` stores a block, `kv.kept` returns it, on the threads that serve links. The creditor neither
    attends to a block nor checks it: the debtor knows its checksum."""

    def __init__(self, records: Records, grants: LentGrants) -> None:
        self._records = records
        self._grants = grants
        self.copying = threading.Lock()
        """Held while a thread uses the records."""
        self.receivers: dict[str, Receiver] = {KEEP: self._keep, KEPT: self._kept}

    def _keep(self, peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> Reception:
        """Admit a block. The slot keeps its old content until all bytes have arrived."""
        expected = self._records.record_bytes
        if list(sizes_bytes) != [expected]:
            raise InvalidMessage(f"buffers of {list(sizes_bytes)} bytes where a block has {expected}")
        row = np.empty(expected, dtype=np.uint8)

        def keep(block: int) -> Reply:
            self._records.write([row], [block])
            return Reply()

        return self._admit(peer, header, keep, [bytes_of(row)])

    def _kept(self, peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> Reception:
        """Admit a request. The reply is a copy, so that the grant may end while it is sent."""
        if sizes_bytes:
            raise InvalidMessage("a request for a block carries no buffers")

        def kept(block: int) -> Reply:
            row = np.empty(self._records.record_bytes, dtype=np.uint8)
            self._records.read([block], [row])
            return Reply(b"", [bytes_of(row)])

        return self._admit(peer, header, kept)

    def _admit(
        self, peer: Peer, header: bytes, work: Callable[[int], Reply], buffers: Sequence[Buffer] = ()
    ) -> Reception:
        """Reserve the slot until the message is processed. Raises StaleEpoch for others than its debtor."""
        slot = decode(header, LentSlot)
        if not 0 <= slot.block < 1 << 31:
            raise InvalidMessage(f"no block has the number {slot.block}")
        refs = [GrantRef(slot.grant_id, slot.generation)]
        entered = self._grants.enter(peer, refs)
        blocks = np.array([slot.block], dtype=np.int32)
        if entered is None or self._grants.loans(entered, KvTier.HOST, blocks) is None:
            if entered is not None:
                self._grants.leave(refs)
            raise StaleEpoch("the grant was revoked, has expired or was never yours: borrow again")

        def commit() -> Reply:
            try:
                with self.copying:
                    return work(slot.block)
            finally:
                self._grants.leave(refs)

        return Reception(commit, lambda: self._grants.leave(refs), buffers)


def lent_records(engine: CacheableEngine, blocks: int, host: LentBlocks | None) -> Records:
    """Return `blocks` of lent host memory as rows of bytes: `host` where attention works on it, else new
    memory that is only written and read."""
    if host is not None:
        return Records(host.pools)
    return Records([(np.zeros((blocks, engine.records().record_bytes), dtype=np.uint8),)])


_log = get_logger("worker.keeping")
_PROFILES = 4
_DIAL_S = 5.0
"""Longer than the deadlines of a ticket and a dial together."""


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """Location of a slot."""

    creditor: Start
    """Worker id and incarnation."""
    slot: LentSlot


class PeerWays:
    """`PeerMemory` of one worker: copies blocks to and from lent slots, on the copying threads.

    Loads and stores run on two threads, so each creditor has one link for each. Both are dialled with its
    first grant, and again after an idle link was closed. A creditor that does not answer has failed, and none
    of its slots is used again. A creditor that ended a grant loses only that grant.

    `on_failed` gets the creditor and the ended grant, None for all of its grants, on a copying thread."""

    def __init__(
        self,
        registry: Registry,
        loop: asyncio.AbstractEventLoop,
        answer_s: float,
        on_failed: Callable[[Start, int | None], None],
    ) -> None:
        """`answer_s`: time after which a silent creditor has failed."""
        self._registry = registry
        self._loop = loop
        self._answer_s = answer_s
        self._on_failed = on_failed
        self._lock = threading.Lock()
        self._places: dict[int, SlotPlace] = {}
        self._links: dict[tuple[str, Start], PeerLink] = {}
        """By kind of message and creditor."""
        self._is_closed = False

    # --- on the event loop

    async def reach(self, place: SlotPlace, record_bytes: int) -> float:
        """Dial both links to the slot's creditor, so that no load waits for a dial.

        Returns the seconds that one block takes, 0 for links that were open. Raises KvasirError."""
        creditor, block_s = place.creditor, 0.0
        if (KEPT, creditor) not in self._links:
            link = await self._registry.dial(*creditor)
            try:
                block_s = await asyncio.to_thread(self._timed, link, place, record_bytes)
            except BaseException:
                link.close()
                raise
            self._enter((KEPT, creditor), link)
        if (KEEP, creditor) not in self._links:
            self._enter((KEEP, creditor), await self._registry.dial(*creditor))
        return block_s

    def _timed(self, link: PeerLink, place: SlotPlace, record_bytes: int) -> float:
        """Return the shortest of some fetches of the slot, in seconds. Raises KvasirError."""
        row, best_s = np.empty(record_bytes, dtype=np.uint8), float("inf")
        for _ in range(_PROFILES):
            began_s = perf_counter()
            self._copy(link, KEPT, place, row)
            best_s = min(best_s, perf_counter() - began_s)
        return best_s

    def admit(self, places: Mapping[int, SlotPlace]) -> None:
        """Enter slots whose creditor is reached."""
        with self._lock:
            self._places.update(places)

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget slots that are no longer lent, and close links to creditors without any."""
        with self._lock:
            for number in numbers:
                self._places.pop(number, None)
            creditors = {place.creditor for place in self._places.values()}
            unused = [key for key in self._links if key[1] not in creditors]
            links = [self._links.pop(key) for key in unused]
        for link in links:
            link.close()

    def close(self) -> None:
        """Close all links, which ends the waits on them. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._places.clear()
        self.forget(())

    # --- on the threads that copy

    def read(self, place: int, row: RecordRow) -> bool:
        return self._ask(KEPT, place, row)

    def write(self, place: int, row: RecordRow) -> bool:
        return self._ask(KEEP, place, row)

    def _ask(self, kind: str, number: int, row: RecordRow) -> bool:
        place = self._places.get(number)
        if place is None:
            return False
        try:
            link = self._links.get((kind, place.creditor))
            if link is not None and not link.closed:
                with suppress(PeerLost):  # It was idle, and turns out to be closed.
                    return self._copy(link, kind, place, row)
                if number not in self._places:
                    return False
            return self._copy(self._dial((kind, place.creditor)), kind, place, row)
        except StaleEpoch:
            self._fail(place, place.slot.grant_id)
        except KvasirError as error:
            _log.debug("%s at %s: %s", kind, place.creditor[0], error)
            self._fail(place, None)
        return False

    def _copy(self, link: PeerLink, kind: str, place: SlotPlace, row: RecordRow) -> bool:
        """Raises KvasirError."""
        header = msgspec.msgpack.encode(place.slot)
        brought, into = ([bytes_of(row)], ()) if kind == KEEP else ((), [bytes_of(row)])
        answer = link.ask(kind, header, brought, into=into, deadline_s=self._answer_s)
        if answer.buffers != len(into):
            raise InvalidMessage(f"{place.creditor[0]} answered without the block")
        return True

    def _dial(self, key: tuple[str, Start]) -> PeerLink:
        """Return a new link, dialled by the event loop. Raises KvasirError."""
        dialling = self._registry.dial(*key[1])
        try:
            future = asyncio.run_coroutine_threadsafe(dialling, self._loop)
        except RuntimeError:  # The loop has ended.
            dialling.close()
            raise PeerLost("this worker is shutting down") from None
        try:
            link = future.result(_DIAL_S)
        except (TimeoutError, concurrent.futures.CancelledError):
            future.cancel()
            raise DeadlineExceeded(f"no link within {_DIAL_S:g} s") from None
        self._enter(key, link)
        return link

    def _enter(self, key: tuple[str, Start], link: PeerLink) -> None:
        """Keep a new link. Raises PeerLost while this worker shuts down."""
        with self._lock:
            is_closed, before = self._is_closed, self._links.pop(key, None)
            if not is_closed:
                self._links[key] = link
        if before is not None:
            before.close()
        if is_closed:
            link.close()
            raise PeerLost("this worker is shutting down")

    def _fail(self, at: SlotPlace, grant_id: int | None) -> None:
        """Give up a creditor, or one grant of it."""
        with self._lock:
            gone = [
                number
                for number, place in self._places.items()
                if place.creditor == at.creditor and grant_id in (None, place.slot.grant_id)
            ]
        self.forget(gone)
        if gone and not self._is_closed:
            self._on_failed(at.creditor, grant_id)


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
