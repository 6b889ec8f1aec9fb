"""Borrowed blocks copied home while the engine goes on: over a link of their own, which no step uses.

    engine's thread          plan: which blocks, where they lie, from now on writes to them are watched
    any other thread         each layer is fetched from the creditor into scratch memory
    `TransferEngine`         the whole blocks are written into own, withdrawn places
    engine's thread          swap: sequences use the copies; what was written meanwhile is fetched once more

Knows no sequence, and decides nothing.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.engine.attention import PagedAttention
from services.worker.kv.tiers.records import Records, records_of
from services.worker.kv.transfers import Route, TransferEngine
from services.worker.peers.attention.core.cost import CreditorSpeeds
from services.worker.peers.attention.debtor import Debtor
from services.worker.peers.attention.messages import GrantRef
from services.worker.peers.attention.shares import CreditorMemory, StepShare, into_rows, visit_blocks, whole
from services.worker.peers.attention.staging import Staging
from services.worker.peers.core.neighbours import LinkRates
from services.worker.peers.registry import Registry
from services.worker.peers.transport.base import PeerLink
from shared.clock import Clock
from shared.errors import KvasirError, NoResponder
from shared.messages.lending import KvTier

Lender = tuple[str, int, KvTier]
"""A creditor's worker id and incarnation, and which memory of its."""


@dataclass(frozen=True, slots=True)
class HomeFetch:
    """Blocks of one creditor, and the own, withdrawn places that they are copied to."""

    lender: Lender
    grants: tuple[GrantRef, ...]
    blocks: tuple[int, ...]
    """As the creditor counts them."""
    places: tuple[int, ...]
    ids: tuple[int, ...]
    """As they are called here."""


@dataclass(slots=True)
class _Way:
    """To one creditor's memory: whose turn it is, and what of it may be read into."""

    link: PeerLink
    memory: CreditorMemory
    lock: asyncio.Lock


class Homeward:
    """One worker's. `debtor` is asked for what any thread may know."""

    def __init__(
        self,
        attention: PagedAttention,
        debtor: Debtor,
        registry: Registry,
        transfers: TransferEngine,
        clock: Clock,
    ) -> None:
        self._attention = attention
        self._debtor = debtor
        self._registry = registry
        self._transfers = transfers
        self._clock = clock
        self._records: Records = records_of(attention.pools)
        """Written by `transfers` alone."""
        self._ways: dict[Lender, _Way] = {}

    async def fetch(self, work: HomeFetch) -> None:
        """When it returns the blocks are in their places; until then these are written to, so it is not to be
        cancelled. Raises NoResponder where the creditor cannot be reached, and KvasirError where it fails in
        the middle."""
        way = self._ways.get(work.lender)
        if way is None or way.link.closed:
            way = self._ways[work.lender] = await self._open(work.lender)
        try:
            async with way.lock:
                way.memory.grants = work.grants
                rows = await asyncio.to_thread(self._read, way.memory, work.blocks)
                await asyncio.to_thread(self._write, rows, work.places)
        except BaseException:
            way.link.close()
            raise

    def forget(self, lender: Lender) -> None:
        """It lends nothing more. Any thread may call this."""
        way = self._ways.pop(lender, None)
        if way is not None:
            way.link.close()

    def close(self) -> None:
        """Every link."""
        for lender in list(self._ways):
            self.forget(lender)

    async def _open(self, lender: Lender) -> _Way:
        worker_id, incarnation, tier = lender
        try:
            link = await self._registry.dial(worker_id, incarnation)
        except KvasirError as error:
            raise NoResponder(f"no link to worker {worker_id}: {error.message}") from error
        staging = Staging(self._attention, self._debtor.staging_blocks)
        speeds = CreditorSpeeds(LinkRates().link(worker_id, link.transport))
        memory = CreditorMemory(link, (), speeds, staging, self._debtor.deadline_s, tier)
        return _Way(link, memory, asyncio.Lock())

    def _read(self, memory: CreditorMemory, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
        part = whole(0, np.array(blocks, dtype=np.int32), self._debtor.block_tokens)
        rows = np.empty((len(blocks), self._records.record_bytes), dtype=np.uint8)

        def share() -> StepShare:
            """Described with every message: steps meanwhile would have it forgotten."""
            return StepShare(memory, part, self._debtor.next_number(), self._clock)

        pools = self._attention.pools
        visit_blocks(share, range(len(blocks)), len(pools), into_rows(rows, pools))
        return rows

    def _write(self, rows: npt.NDArray[np.uint8], places: Sequence[int]) -> None:
        def write() -> bool:
            self._records.write(list(rows), list(places))
            return True

        within_s = self._debtor.deadline_s
        self._transfers.run(Route.PULL, write, failed=False, size_bytes=rows.nbytes, within_s=within_s)
