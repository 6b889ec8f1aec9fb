"""The prefix cache as transfers use it: each call runs on the engine's thread, between two iterations.

Blocks lie on the ledge while they arrive: allocated, and nobody's yet. They get their names when their bytes
are there and verified, or go back. Knows no link.
"""

from collections.abc import Sequence
from concurrent.futures import Future

from services.worker.door import Door
from services.worker.kv.core.prefix_cache import PrefixCache
from shared.blocks import BlockHash


class Ledge:
    """Of one worker, whose engine thread owns `cache`. Who stops waiting leaves no block behind."""

    def __init__(self, door: Door, cache: PrefixCache) -> None:
        self._door = door
        self._cache = cache

    def known_blocks(self, names: Sequence[BlockHash]) -> "Future[int]":
        """How many of these, from the first on, are on the device. Raises Overloaded."""
        return self._door.ask(lambda core, _: self._cache.known_blocks(names))

    def hold(self, names: Sequence[BlockHash], timeout_s: float) -> list[int]:
        """See `PrefixCache.hold`; not for the event loop. Raises Overloaded and DeadlineExceeded."""
        return self._door.take_within(
            lambda core, _: self._cache.hold(names), self._cache.release, timeout_s=timeout_s
        )

    def let_go(self, blocks: Sequence[int]) -> None:
        """Held before."""
        if blocks:
            self._door.give(lambda core, _: self._cache.release(blocks))

    async def make_room(self, blocks: int) -> list[int]:
        """Blocks to receive into; none when they would have to be taken from somebody. As many again stay
        free, so that plans that count on them are not refused. Raises Overloaded."""

        def allocate() -> list[int]:
            return self._cache.allocate(blocks) if self._cache.can_allocate(2 * blocks) else []

        return await self._door.take(lambda core, _: allocate(), self._cache.release)

    def take_in(
        self, blocks: Sequence[int], names: Sequence[BlockHash], parent: BlockHash | None
    ) -> "Future[int]":
        """The first `len(names)` of these have arrived and follow `parent`: they are stored from now on. The
        rest is given back. How many of `names` are on the device now, from the first on."""

        def store() -> int:
            before = parent
            for block, name in zip(blocks, names, strict=False):
                self._cache.publish(block, name, before)
                before = name
            self._cache.release(blocks)
            kept = self._cache.hold(names)
            self._cache.release(kept)
            return len(kept)

        return self._door.give(lambda core, _: store())
