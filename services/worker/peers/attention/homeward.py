"""Copies borrowed blocks home beside the engine, over a link of their own that no step uses.

    engine's thread          plan: which blocks, where they are; from now on writes to them are recorded
    any other thread         fetches each layer from the creditor into scratch memory
    `TransferEngine`         writes the complete blocks into own, withdrawn places
    engine's thread          swap: sequences use the copies; blocks written meanwhile are fetched again

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
"""A creditor's worker id, incarnation, and tier of its memory."""


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
class _Way:
    """A reader of one creditor's memory, and whose turn it is."""

    reader: BlockReader
    lock: asyncio.Lock


_log = get_logger("worker.homeward")


class Homeward:
    """Copies blocks of creditors into one worker's `pools`."""

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
        """Only `transfers` writes them."""
        self._ways: dict[Lender, _Way] = {}

    async def fetch(self, work: HomeFetch) -> bool:
        """Copy blocks into their places; return False without a link, or when they cannot be written now.

        Must not be cancelled: a thread writes to the places. Raises KvasirError when the creditor fails."""
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
        """Close the link to a lender without loans. Any thread may call it."""
        way = self._ways.pop(lender, None)
        if way is not None:
            way.reader.link.close()

    def close(self) -> None:
        """Close every link."""
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
