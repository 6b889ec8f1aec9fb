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

from services.worker.kv.tiers.records import LayerPools, Records, records_of
from services.worker.kv.transfers import Route, TransferEngine
from services.worker.peers.attention.interfaces import BlockDebtor, BlockReader
from services.worker.peers.attention.messages import GrantRef
from services.worker.peers.registry import Registry
from shared.errors import KvasirError
from shared.log import get_logger
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
    """To one creditor's memory: whose turn it is, and what reads there."""

    reader: BlockReader
    lock: asyncio.Lock


_log = get_logger("worker.homeward")


class Homeward:
    """One worker's, into its `pools`."""

    def __init__(
        self,
        pools: LayerPools,
        debtor: BlockDebtor,
        registry: Registry,
        transfers: TransferEngine,
    ) -> None:
        self._debtor = debtor
        self._registry = registry
        self._transfers = transfers
        self._records: Records = records_of(pools)
        """Written by `transfers` alone."""
        self._ways: dict[Lender, _Way] = {}

    async def fetch(self, work: HomeFetch) -> bool:
        """True: the blocks are in their places; until then these are written to: it is not to be cancelled.
        False: no link leads there, or nothing can be written here now; the creditor is as it was. Raises
        KvasirError where it fails in the middle."""
        try:
            way = await self._way(work.lender)
        except KvasirError as error:
            _log.warning("no link to copy blocks of %s over: %s", work.lender[0], error)
            return False
        async with way.lock:
            blocks = np.array(work.blocks, dtype=np.int32)
            rows = np.empty((len(blocks), self._records.record_bytes), dtype=np.uint8)
            try:
                await asyncio.to_thread(way.reader.read, work.grants, blocks, rows)
            except BaseException:
                way.reader.link.close()
                raise
            try:
                await asyncio.to_thread(self._write, rows, work.places)
            except KvasirError as error:
                _log.warning("blocks of %s were not written: %s", work.lender[0], error)
                return False
        return True

    def forget(self, lender: Lender) -> None:
        """It lends nothing more. Any thread may call this."""
        way = self._ways.pop(lender, None)
        if way is not None:
            way.reader.link.close()

    def close(self) -> None:
        """Every link."""
        for lender in list(self._ways):
            self.forget(lender)

    async def _way(self, lender: Lender) -> _Way:
        """Raises KvasirError."""
        way = self._ways.get(lender)
        if way is not None and not way.reader.link.closed:
            return way
        worker_id, incarnation, tier = lender
        link = await self._registry.dial(worker_id, incarnation)
        way = self._ways[lender] = _Way(self._debtor.reader(link, tier), asyncio.Lock())
        return way

    def _write(self, rows: npt.NDArray[np.uint8], places: Sequence[int]) -> None:
        def write() -> bool:
            self._records.write(list(rows), list(places))
            return True

        within_s = self._debtor.deadline_s
        self._transfers.run(Route.PULL, write, failed=False, size_bytes=rows.nbytes, within_s=within_s)
