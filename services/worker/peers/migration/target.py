"""The taking side: fetches blocks by name into the prefix cache, a batch at a time, while the engine goes on.

A batch is quarantined: allocated, filled by the link's thread, verified block by block, and only then named,
so a fetch may end anywhere and leaves whole blocks or nothing. Where it stops the target computes the rest.
One question at a time for each source. Decides nothing about sequences.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from services.worker.kv.tiers.checksums import CRC, Checksums
from services.worker.kv.tiers.records import Records
from services.worker.kv.tiers.throttle import Throttle
from services.worker.kv.transfers import Route, TransferEngine
from services.worker.peers.engine_calls import CacheDoor
from services.worker.peers.migration.settings import TransferConfig
from services.worker.peers.migration.source import BLOCKS, Wanted, read_given
from services.worker.peers.registry import Registry
from services.worker.peers.transport.base import PeerLink, bytes_of
from shared.blocks import BlockHash, chain, root
from shared.clock import Clock, monotonic_s
from shared.errors import DeadlineExceeded, InvalidMessage, KvasirError
from shared.messages.moves import BlocksPulled, PullBlocks

_FAILED_S = 60.0
"""For so long nobody should count on a link over which nothing came."""


@dataclass(slots=True)
class _Way:
    """The link to one life of one worker, if there is one, and whose turn it is."""

    incarnation: int
    lock: asyncio.Lock
    used_s: float
    link: PeerLink | None = None
    failed_s: float = float("-inf")
    """When nothing could be fetched."""


class Target:
    """One worker's. `fingerprint` names what must agree for KV to be exchanged."""

    def __init__(
        self,
        registry: Registry,
        cache: CacheDoor,
        transfers: TransferEngine,
        records: Records,
        fingerprint: bytes,
        block_tokens: int,
        config: TransferConfig,
        clock: Clock = monotonic_s,
        sums: Checksums = CRC,
    ) -> None:
        self._sums = sums
        self._registry = registry
        self._cache = cache
        self._transfers = transfers
        self._records = records
        """Written by `transfers` alone."""
        self._fingerprint = fingerprint
        self._block_tokens = block_tokens
        self._config = config
        self._clock = clock
        self._throttle = Throttle(config.link_bytes_per_s)
        self._ways: dict[str, _Way] = {}
        self.fetched_blocks = 0
        self.refused_blocks = 0
        """That arrived and were not what they were called."""

    async def pull(self, order: PullBlocks) -> BlocksPulled:
        """As far as it gets within the order's time. Raises KvasirError when nothing could be fetched."""
        names = chain(root(self._fingerprint, order.cache_salt), order.tokens, self._block_tokens)
        way = self._way(order.source, order.source_incarnation)
        try:
            async with asyncio.timeout(order.valid_for_s + self._config.answer_s), way.lock:
                return await self._pull(order, way, names)
        except KvasirError:
            way.failed_s = self._clock()
            raise
        except TimeoutError:
            way.failed_s = self._clock()
            raise DeadlineExceeded(f"{order.source} did not give its blocks in time") from None

    async def _pull(self, order: PullBlocks, way: _Way, names: Sequence[BlockHash]) -> BlocksPulled:
        began_s = now_s = self._clock()
        known = held = await asyncio.wrap_future(self._cache.known_blocks(names))
        while held < len(names) and now_s - began_s < order.valid_for_s:
            batch = names[held : held + self._config.batch_blocks]
            count = await self._fetch(order.source, way, names[held - 1] if held else None, batch)
            now_s, held = self._clock(), held + count
            if not count:
                break
        size_bytes = (held - known) * self._records.record_bytes
        self._registry.rates.on_delivered(order.source, size_bytes, now_s - began_s)
        return BlocksPulled(
            held_tokens=held * self._block_tokens,
            fetched_blocks=held - known,
            fetched_bytes=size_bytes,
            took_s=now_s - began_s,
        )

    def sources(self) -> list[str]:
        """Workers that blocks were fetched from, and not long ago."""
        return sorted(self._ways)

    def bytes_per_s(self, source: str) -> float | None:
        """What fetching from there brings: 0 for a while after it failed; None: nobody knows yet."""
        way = self._ways.get(source)
        if way is not None and self._clock() - way.failed_s < _FAILED_S:
            return 0.0
        measured = self._registry.rates.bytes_per_s(source)
        limit = self._config.link_bytes_per_s
        return measured if measured is None or not limit else min(measured, limit)

    def forget_idle(self, idle_s: float) -> None:
        """Ends the links that were not used for so long: their workers may be gone."""
        now_s = self._clock()
        for source, way in list(self._ways.items()):
            if now_s - way.used_s > idle_s and not way.lock.locked():
                self._registry.plane.choice.forget(source)
                self.forget(source)

    def forget(self, source: str) -> None:
        """That worker is gone or another now."""
        way = self._ways.pop(source, None)
        if way is not None and way.link is not None:
            way.link.close()

    def close(self) -> None:
        """Ends all links."""
        for source in list(self._ways):
            self.forget(source)

    def _way(self, source: str, incarnation: int) -> _Way:
        way = self._ways.get(source)
        if way is None or way.incarnation != incarnation:
            if way is not None:
                self._registry.plane.choice.forget(source)
            self.forget(source)
            way = self._ways[source] = _Way(incarnation, asyncio.Lock(), self._clock())
        way.used_s = self._clock()
        return way

    async def _linked(self, source: str, way: _Way) -> PeerLink:
        if way.link is None or way.link.closed:
            way.link = await self._registry.dial(source, way.incarnation)
        return way.link

    async def _fetch(
        self, source: str, way: _Way, parent: BlockHash | None, names: Sequence[BlockHash]
    ) -> int:
        """How many of `names` are there now, from the first on. Raises KvasirError when the link fails."""
        link = await self._linked(source, way)
        blocks = await self._cache.make_room(len(names))
        if not blocks:
            return 0
        receiving = asyncio.ensure_future(asyncio.to_thread(self._receive, link, names, blocks))
        count = 0
        try:
            count = await asyncio.shield(receiving)
        except asyncio.CancelledError:
            link.close()  # nothing is written once the thread has noticed
            receiving.add_done_callback(lambda late: self._give_back(late, blocks))
            raise
        except BaseException:
            self._cache.take_in(blocks, (), parent)
            raise
        self.fetched_blocks += count
        return await asyncio.wrap_future(self._cache.take_in(blocks, names[:count], parent))

    def _give_back(self, late: "asyncio.Future[int]", blocks: Sequence[int]) -> None:
        if not late.cancelled():
            late.exception()
        self._cache.take_in(blocks, (), None)

    def _receive(self, link: PeerLink, names: Sequence[BlockHash], blocks: Sequence[int]) -> int:
        """On a thread of its own: into scratch memory, then, verified, into `blocks`."""
        rows = np.empty((len(names), self._records.record_bytes), dtype=np.uint8)
        header = msgspec.msgpack.encode(Wanted(self._fingerprint, tuple(names)))
        into = [bytes_of(row) for row in rows]
        answer = link.ask(BLOCKS, header, into=into, deadline_s=self._config.answer_s)
        given = read_given(answer.header)
        if len(given.checksums) != answer.buffers:
            raise InvalidMessage("blocks came without their checksums")
        self._throttle.wait(answer.buffers * self._records.record_bytes)
        good, is_comparable = 0, given.sums == self._sums.kind  # Where it is not, the link has verified them.
        for row, name, expected in zip(rows[: answer.buffers], names, given.checksums, strict=False):
            if is_comparable and self._sums.of(row, name, self._fingerprint) != expected:
                self.refused_blocks += answer.buffers - good
                break
            good += 1

        def write() -> int:
            self._records.write(list(rows[:good]), list(blocks[:good]))
            return good

        size_bytes = good * self._records.record_bytes
        return self._transfers.run(
            Route.PULL, write, 0, size_bytes=size_bytes, within_s=self._config.answer_s
        )
