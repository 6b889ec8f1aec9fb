"""Borrowed blocks in use: gives a grant's blocks ids for sequences, brings blocks home, or drops lost ones.

Stands between lending, on the event loop, and the engine's thread, which alone accesses the pool, the homes
of blocks and the links of steps. Blocks come home beside the engine, over a link that no step uses: `plan`
begins to record writes, another thread fetches the blocks, `TransferEngine` writes them into withdrawn own
places, and `swap` fetches again what was written meanwhile, between two steps.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from services.worker.core.steps import StepCore
from services.worker.door import Door, EngineQuestion
from services.worker.kv.core.borrowed_pool import ExtendedPool
from services.worker.kv.tiers.records import LayerPools, records_of
from services.worker.kv.transfers import Route, TransferEngine
from services.worker.peers.attention.interfaces import BlockDebtor, LentTier, Place
from services.worker.peers.attention.messages import GrantRef
from services.worker.peers.lending.core.debts import GrantKey
from services.worker.peers.registry import Registry
from services.worker.peers.transport.link import PeerLink
from shared.errors import CreditorLost, KvasirError, Overloaded
from shared.log import get_logger
from shared.messages.lending import Grant, KvTier

Pair = tuple[int, int]
"""A borrowed block, and the withdrawn own block that its KV goes to."""
Lender = tuple[str, int, KvTier]
"""A creditor's worker id, incarnation, and tier of its memory."""
T = TypeVar("T")
_log = get_logger("worker.borrower")


class Homecoming:
    """Moves borrowed blocks home, on the engine's thread. `forget` drops ids that are no longer borrowed."""

    def __init__(
        self, debtor: BlockDebtor, pool: ExtendedPool, forget: Callable[[Iterable[int]], None]
    ) -> None:
        self._debtor = debtor
        self._pool = pool
        self._forget = forget

    def plan(self, pairs: Sequence[Pair]) -> list[tuple[Pair, Place]]:
        """Return the pairs to copy, those that a sequence uses, and their places. Starts to watch writes."""
        planned = self._used(pairs)
        self._debtor.watch.restart({place: own for (_, own), place in planned})
        return planned

    def swap(self, pairs: Sequence[Pair]) -> list[int]:
        """Switch to the copies; return the unneeded own blocks. Raises CreditorLost, and switches none."""
        watch = self._debtor.watch
        missing = [pair for pair, place in self._used(pairs) if not watch.is_copy(place, pair[1])]
        self._debtor.bring_home(missing)
        watch.restart({})
        spare = self._pool.come_home(pairs)
        self._forget([there for there, _ in pairs])
        return spare

    def begin_recall(self, blocks: Sequence[int], most_blocks: int, keep_blocks: int) -> list[Pair]:
        """Set apart up to `most_blocks` used blocks, each with a free own block; `keep_blocks` stay free.

        `end_recall` must follow."""
        own = self._pool.own
        room = min(own.free_blocks + own.evictable_blocks - keep_blocks, own.base.lendable_blocks)
        chosen = self._pool.set_apart(self._pool.are_used(blocks), min(most_blocks, room))
        return list(zip(chosen, own.withdraw(own.allocate(len(chosen))), strict=True)) if chosen else []

    def end_recall(self, pairs: Sequence[Pair]) -> list[int]:
        """Return the blocks that are home now. Raises CreditorLost, and changes nothing."""
        own, recalled = self._pool.own, [there for there, _ in pairs]
        try:
            spare = self.swap(pairs)
        except BaseException:
            own.readmit([place for _, place in pairs])
            self._pool.rejoin(recalled)  # Also blocks of living creditors: nothing else would.
            raise
        own.readmit(spare)
        return recalled

    def _used(self, pairs: Sequence[Pair]) -> list[tuple[Pair, Place]]:
        """Return the pairs whose block a sequence uses, and where it is."""
        used = set(self._pool.are_used([there for there, _ in pairs]))
        found = [pair for pair in pairs if pair[0] in used]
        holders, blocks = self._debtor.homes.locate([there for there, _ in found])
        return list(zip(found, zip(holders.tolist(), blocks.tolist(), strict=True), strict=True))


@dataclass(frozen=True, slots=True)
class HomeFetch:
    """Blocks of one creditor, and the withdrawn own blocks to copy them to."""

    lender: Lender
    grants: tuple[GrantRef, ...]
    blocks: tuple[int, ...]
    """Numbers at the creditor."""
    places: tuple[int, ...]
    ids: tuple[int, ...]
    """Logical numbers here."""


@dataclass(slots=True)
class _Held:
    """A grant on the engine's thread."""

    generation: int
    blocks: int = 0


@dataclass(slots=True)
class _Lending:
    """A lender on the engine's thread: its holder, and its grants with blocks here, named in messages."""

    holder: int
    grants: dict[int, _Held] = field(default_factory=dict)

    def refs(self) -> tuple[GrantRef, ...]:
        return tuple(GrantRef(grant_id, held.generation) for grant_id, held in self.grants.items())


class Borrower:
    """One worker's borrowed blocks in use.

    Calls to the engine's thread go through its `door`, and complete even when the caller is cancelled.
    `on_failed` gets a creditor that failed in a step, on that thread."""

    def __init__(
        self,
        debtor: BlockDebtor,
        pool: ExtendedPool,
        door: Door,
        registry: Registry,
        pools: LayerPools,
        transfers: TransferEngine,
        on_failed: Callable[[str], None],
    ) -> None:
        """`pools`: the engine's."""
        self._debtor = debtor
        self._pool = pool
        self._door = door
        self._registry = registry
        self._transfers = transfers
        self._records = records_of(pools)
        """Only `transfers` writes them."""
        self._on_failed = on_failed
        self._homecoming = Homecoming(debtor, pool, self._forget)
        self._recalling: set[asyncio.Task[list[int]]] = set()
        self._ways: dict[Lender, tuple[LentTier, asyncio.Lock]] = {}
        """Links beside the steps' own, and whose turn it is."""
        self._lendings: dict[Lender, _Lending] = {}
        self._of_block: dict[int, tuple[Lender, int]] = {}
        """Lender and grant of each block."""

    # --- on the event loop

    async def admit(self, grant: Grant, logical: Sequence[int]) -> bool:
        """Start to use a grant. False when its creditor cannot be reached, or too many creditors lend."""
        lender = (grant.creditor_id, grant.creditor_incarnation, grant.tier)
        link: PeerLink | None = None
        if lender not in self._lendings:
            try:
                link = await self._registry.dial(grant.creditor_id, grant.creditor_incarnation)
            except KvasirError as error:
                _log.warning("blocks of %s cannot be used: %s", grant.creditor_id, error)
                return False
        return await self._give(lambda core, _: self._enter(lender, link, grant, logical))

    def rename(self, grant: GrantKey, generation: int) -> None:
        """Record a newer generation of a grant."""

        def rename(core: StepCore, now_s: float) -> None:
            for lender, lending in self._lendings.items():
                held = lending.grants.get(grant.grant_id)
                if lender[:2] == (grant.creditor_id, grant.creditor_incarnation) and held is not None:
                    held.generation = max(generation, held.generation)
                    self._name_grants(lender)

        self._door.give(rename)

    async def retire(self, most_blocks: int, *, cached: bool = True) -> list[int]:
        """Give up to `most_blocks` without a sequence; `cached`: cached ones too. Return which."""

        def retire(core: StepCore, now_s: float) -> list[int]:
            retired = self._pool.retire(most_blocks, cached=cached)
            self._forget(retired)
            return retired

        return await self._give(retire)

    async def set_apart(self, logical: Sequence[int], most_blocks: int) -> list[int]:
        """Pin up to `most_blocks` of these in place until `rejoin` or `swap_home`. Raises Overloaded."""
        return await self._door.take(
            lambda core, _: self._pool.set_apart(logical, most_blocks), self._pool.rejoin
        )

    def rejoin(self, logical: Sequence[int]) -> None:
        """End `set_apart`; unknown blocks are ignored."""
        self._door.give(lambda core, _: self._pool.rejoin(logical))

    async def copy_home(self, pairs: Sequence[Pair]) -> bool:
        """Copy blocks into withdrawn own ones beside the engine; the originals stay valid.

        False when a creditor failed. Raises Overloaded."""
        planned = await asyncio.wrap_future(
            self._door.ask(lambda core, _: self._fetches(self._homecoming.plan(pairs)))
        )
        return await self._fetch_all(planned)

    async def swap_home(self, pairs: Sequence[Pair]) -> list[int] | None:
        """Switch sequences to the copies; return the unneeded own blocks. None when a creditor failed."""
        return await self._give(self._home(lambda: self._homecoming.swap(pairs)))

    async def recall(self, logical: Sequence[int], most_blocks: int, keep_blocks: int) -> list[int]:
        """Bring up to `most_blocks` in use home into free own blocks; return which.

        It runs to its end even when the caller is cancelled."""
        task = asyncio.ensure_future(self._recall(logical, most_blocks, keep_blocks))
        self._recalling.add(task)
        task.add_done_callback(self._recalling.discard)
        return await asyncio.shield(task)

    async def _recall(self, logical: Sequence[int], most_blocks: int, keep_blocks: int) -> list[int]:
        homecoming = self._homecoming

        def begin(core: StepCore, now_s: float) -> tuple[list[Pair], list[HomeFetch]]:
            pairs = homecoming.begin_recall(logical, most_blocks, keep_blocks)
            return pairs, self._fetches(homecoming.plan(pairs))

        pairs, planned = await self._give(begin)
        if not pairs:
            return []
        await self._fetch_all(planned)  # `end_recall` fetches the missing ones between two steps.
        return await self._give(self._home(lambda: homecoming.end_recall(pairs))) or []

    async def _fetch_all(self, planned: Sequence[HomeFetch]) -> bool:
        """Return whether all blocks were copied. A creditor that fails in the middle is given up."""
        is_whole = True
        for work in planned:
            failed: KvasirError | None = None
            try:
                is_copied = await asyncio.shield(asyncio.ensure_future(self._fetch(work)))
            except KvasirError as error:
                is_copied, failed = False, error
            if not is_copied:
                await self._give(partial(self._on_missed, work, failed))
                is_whole = False
        return is_whole

    async def _fetch(self, work: HomeFetch) -> bool:
        """Copy blocks into their places; return False without a link, or when they cannot be written now.

        Must not be cancelled: a thread writes to the places. Raises KvasirError when the creditor fails."""
        way = self._ways.get(work.lender)
        if way is None or way[0].link.closed:
            worker_id, incarnation, tier = work.lender
            try:
                link = await self._registry.dial(worker_id, incarnation)
            except KvasirError as error:
                _log.warning("no link to copy blocks of %s over: %s", worker_id, error)
                return False
            way = self._ways[work.lender] = LentTier(link, (), tier, attends=True), asyncio.Lock()
        reader, lock = way
        async with lock:
            blocks = np.array(work.blocks, dtype=np.int32)
            rows = np.empty((len(blocks), self._records.record_bytes), dtype=np.uint8)
            reader.grants = work.grants
            try:
                await asyncio.to_thread(self._debtor.fetch, reader, blocks, rows)
            except BaseException:
                reader.link.close()
                raise
            try:
                await asyncio.to_thread(self._write, rows, work.places)
            except KvasirError as error:
                _log.warning("blocks of %s were not written: %s", work.lender[0], error)
                return False
        return True

    def _write(self, rows: npt.NDArray[np.uint8], places: Sequence[int]) -> None:
        def write() -> bool:
            self._records.write(list(rows), list(places))
            return True

        within_s = self._debtor.deadline_s
        self._transfers.run(Route.PULL, write, failed=False, size_bytes=rows.nbytes, within_s=within_s)

    def lose(self, logical: Sequence[int]) -> None:
        """Drop blocks whose lease has ended."""

        def forget(core: StepCore, now_s: float) -> None:
            self._forget(logical)
            core.on_kv_lost(logical, now_s)  # The next step or tick reports the ended sequences.

        self._door.give(forget)

    def close(self) -> None:
        """Close every link, after the engine's thread has ended."""
        for lender in list(self._ways):
            self._close_way(lender)
        self._debtor.close()

    def _close_way(self, lender: Lender) -> None:
        """Close the link to a lender without loans. Any thread may call it."""
        way = self._ways.pop(lender, None)
        if way is not None:
            way[0].link.close()

    async def _give(self, question: EngineQuestion[T]) -> T:
        return await asyncio.wrap_future(self._door.give(question))

    def _home(self, bring: Callable[[], T]) -> EngineQuestion[T | None]:
        def run(core: StepCore, now_s: float) -> T | None:
            try:
                return bring()
            except CreditorLost as error:
                core.on_kv_lost(self.lose_creditor(error), now_s)
                return None

        return run

    # --- on the engine's thread

    def read(self, core: StepCore, now_s: float, blocks: Sequence[int], rows: npt.NDArray[np.uint8]) -> int:
        """Copy blocks into `rows` `[n, record_bytes]`. Return how many, 0 when a creditor failed."""

        def copy() -> int:
            self._debtor.read(blocks, rows)
            return len(blocks)

        return self._home(copy)(core, now_s) or 0

    def lose_creditor(self, error: CreditorLost) -> set[int]:
        """Give up a creditor that failed in a step or a copy; return the lost blocks."""
        _log.warning("creditor %s is given up: %s", error.creditor_id, error.message)
        gone = {block for block, (lender, _) in self._of_block.items() if lender[0] == error.creditor_id}
        self._forget(gone)
        self._on_failed(error.creditor_id)
        return gone

    def _fetches(self, planned: Iterable[tuple[Pair, Place]]) -> list[HomeFetch]:
        """Group planned copies by lender."""
        found: dict[Lender, list[tuple[int, int, int]]] = {}
        for (there, own), (_, block) in planned:
            found.setdefault(self._of_block[there][0], []).append((block, own, there))
        return [
            HomeFetch(lender, self._lendings[lender].refs(), *map(tuple, zip(*each, strict=True)))
            for lender, each in found.items()
        ]

    def _on_missed(self, work: HomeFetch, failed: KvasirError | None, core: StepCore, now_s: float) -> None:
        """Give up a creditor that `failed`, unless its link was closed here because nothing is borrowed."""
        self._debtor.watch.discard(work.places)
        if failed is not None and any(there in self._of_block for there in work.ids):
            lost = CreditorLost(failed.message, creditor_id=work.lender[0])
            core.on_kv_lost(self.lose_creditor(lost), now_s)

    def _enter(self, lender: Lender, link: PeerLink | None, grant: Grant, logical: Sequence[int]) -> bool:
        lending = self._lendings.get(lender)
        if lending is None:
            if link is None:
                return False
            try:
                holder = self._debtor.add(link, (), grant.tier, attends=grant.attends)
            except Overloaded as error:
                _log.warning("blocks of %s cannot be used: %s", grant.creditor_id, error)
                link.close()
                return False
            lending = self._lendings[lender] = _Lending(holder)
        elif link is not None:
            link.close()
        self._of_block.update(dict.fromkeys(logical, (lender, grant.grant_id)))
        lending.grants.setdefault(grant.grant_id, _Held(grant.generation)).blocks += len(logical)
        self._debtor.homes.place(logical, lending.holder, grant.blocks)
        self._name_grants(lender)
        self._pool.admit(logical)
        return True

    def _forget(self, blocks: Iterable[int]) -> None:
        lenders: set[Lender] = set()
        for block in list(blocks):
            lender, grant_id = self._of_block.pop(block, (None, 0))
            if lender is None:
                continue
            self._debtor.homes.forget([block])
            lenders.add(lender)
            grants = self._lendings[lender].grants
            grants[grant_id].blocks -= 1
            if not grants[grant_id].blocks:
                del grants[grant_id]
        for lender in lenders:
            self._name_grants(lender)

    def _name_grants(self, lender: Lender) -> None:
        """Name the lender's grants that have blocks here: others may have ended."""
        lending = self._lendings[lender]
        if lending.grants:
            self._debtor.set_grants(lending.holder, lending.refs())
        else:
            del self._lendings[lender]
            self._debtor.remove(lending.holder)
            self._close_way(lender)
