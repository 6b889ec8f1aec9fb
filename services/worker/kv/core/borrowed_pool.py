"""A pool of a worker's own KV blocks, extended by blocks borrowed from other workers. Pure.

Own blocks are used first, since attention over them costs no message. Borrowed ids lie above the own ids, are
admitted once they are reachable, and may be lost at any time. With a prefix cache, borrowed blocks have names
too: they are shared and outlive their sequence. The pool ignores creditors and grants."""

from collections.abc import Callable, Iterable, Mapping

from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.prefix_cache import PrefixCache
from shared.messages.reports import Capacity

OwnPool = BlockPool | PrefixCache
"""A worker's own blocks; `base` is the pool without names, which lends and grows."""


class ExtendedPool:
    """The pool `own`, with ids below `own_blocks`, and borrowed blocks, which come and go."""

    def __init__(self, own: OwnPool, own_blocks: int) -> None:
        self.own, self.base = own, own.base
        self.own_blocks = own_blocks
        self.block_tokens = own.block_tokens
        self.on_moved: Callable[[Mapping[int, int]], None] = lambda _: None
        """Called with the new ids of blocks that were renamed."""
        self._free: dict[int, None] = {}
        self._used: set[int] = set()
        """Borrowed blocks of sequences or of the cache."""
        self._apart: set[int] = set()
        """Blocks about to come home, which are not given out. Those in use are in `_used` too."""
        self._cache = own if isinstance(own, PrefixCache) else None
        if self._cache is not None:
            self._cache.on_borrowed_free.append(self._set_free)

    @property
    def total_blocks(self) -> int:
        return self.own.total_blocks + self.borrowed_blocks

    @property
    def free_blocks(self) -> int:
        return self.own.free_blocks + len(self._free)

    @property
    def evictable_blocks(self) -> int:
        return self.own.evictable_blocks + self.cached_blocks

    @property
    def cached_blocks(self) -> int:
        """Number of borrowed blocks with a name, unused and not on the way home."""
        if self._cache is None:
            return 0
        return self._cache.idle_borrowed_blocks - sum(self._cache.is_idle(block) for block in self._apart)

    @property
    def borrowed_blocks(self) -> int:
        return len(self._free) + len(self._used)

    @property
    def borrowed_free_blocks(self) -> int:
        """Number of borrowed blocks that no sequence has."""
        return len(self._free) + self.cached_blocks

    def can_allocate(self, blocks: int) -> bool:
        return blocks <= self.free_blocks + self.evictable_blocks

    def allocate(self, blocks: int) -> list[int]:
        """Take blocks, own ones first. Raises ValueError, and takes none, when there are fewer."""
        if blocks < 0 or not self.can_allocate(blocks):
            raise ValueError(f"{blocks} blocks asked for, {self.free_blocks} free")
        of_own = min(blocks, self.own.free_blocks + self.own.evictable_blocks)
        own = self.own.allocate(of_own)
        self._clear(blocks - of_own)
        taken = [block for block, _ in zip(self._free, range(blocks - of_own), strict=False)]
        for block in taken:
            del self._free[block]
        self._used.update(taken)
        return [*own, *taken]

    def release(self, blocks: Iterable[int]) -> None:
        """Release blocks; lost borrowed blocks are ignored. Raises ValueError on one that is free."""
        own: list[int] = []
        for block in blocks:
            if block < self.own_blocks or (self._cache is not None and self._cache.has_name(block)):
                own.append(block)
            elif block in self._used:
                self._set_free(block)
            elif block in self._free:
                raise ValueError(f"block {block} is not taken")
        self.own.release(own)

    def admit(self, blocks: Iterable[int]) -> None:
        """Add reachable borrowed blocks. Raises ValueError for own or known ids."""
        for block in blocks:
            if block < self.own_blocks or block in self._free or block in self._used:
                raise ValueError(f"block {block} is here already")
            self._free[block] = None

    def retire(self, most_blocks: int, *, cached: bool = True) -> list[int]:
        """Remove up to so many unused borrowed blocks, newest first; return them. Named blocks go last, or
        without `cached` not at all."""
        if cached:
            self._clear(most_blocks)
        leaving = list(self._free)[::-1][: max(0, most_blocks)]
        for block in leaving:
            del self._free[block]
        return leaving

    def lose(self, blocks: Iterable[int]) -> None:
        """Remove lost blocks, used or not; unknown ids are ignored."""
        blocks = list(blocks)
        if self._cache is not None:
            self._cache.lose_borrowed(blocks)
        self._drop(blocks)

    def set_apart(self, blocks: Iterable[int], most_blocks: int) -> list[int]:
        """Reserve up to so many of these until `rejoin` or `come_home`, used ones first; return them. They
        keep their users, but are not given out. Unknown and reserved ids are ignored."""
        known = [block for block in blocks if block not in self._apart]
        used = [block for block in known if block in self._used]
        chosen = [*used, *(block for block in known if block in self._free)][: max(0, most_blocks)]
        self._apart.update(chosen)
        for block in chosen:
            self._free.pop(block, None)
        return chosen

    def rejoin(self, blocks: Iterable[int]) -> None:
        """End `set_apart`; blocks that were lost meanwhile are ignored."""
        for block in blocks:
            if block in self._apart:
                self._apart.discard(block)
                if block not in self._used:
                    self._free[block] = None

    def are_used(self, blocks: Iterable[int]) -> list[int]:
        """Return the blocks among these that are in use."""
        return [block for block in blocks if block in self._used]

    def come_home(self, pairs: Iterable[tuple[int, int]]) -> list[int]:
        """Replace blocks set apart by own, withdrawn blocks with the same contents. `pairs`: (block set
        apart, place of the own block). Returns unneeded places, still withdrawn."""
        moves: dict[int, int] = {}
        spare: list[int] = []
        for block, own in pairs:
            is_used = block in self._apart and block in self._used
            self._drop([block])
            if is_used:
                moves[block] = own
            else:
                spare.append(own)
        renamed = dict(zip(moves, self.own.rejoin(moves.values()), strict=True))
        if self._cache is not None:
            self._cache.rename(renamed)
        self.on_moved(renamed)
        return spare

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raise AssertionError unless `held` are the taken blocks."""
        mine: list[int] = []
        there: list[int] = []
        cache = self._cache
        names = set() if cache is None else {block for block in self._used if cache.has_name(block)}
        for block in held:
            (mine if block < self.own_blocks or block in names else there).append(block)
        self.own.check_integrity(mine)
        assert len(there) == len(set(there)), "a borrowed block is held twice"
        assert set(there) | names == self._used, "borrowed blocks lost or held by nobody"
        assert not (self._used | self._apart) & self._free.keys()

    def _set_free(self, block: int) -> None:
        self._used.discard(block)
        if block not in self._apart:
            self._free[block] = None

    def _clear(self, blocks: int) -> None:
        """Free so many borrowed blocks, dropping names if necessary."""
        missing = blocks - len(self._free)
        if missing > 0 and self._cache is not None:
            self._cache.forget_borrowed(missing, self._apart)

    def _drop(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._free.pop(block, None)
            self._used.discard(block)
            self._apart.discard(block)


Pool = OwnPool | ExtendedPool
"""The blocks of a table of sequences."""


def capacity_of(pool: Pool) -> Capacity:
    """Return the pool's part of the heartbeat."""
    extended = pool if isinstance(pool, ExtendedPool) else None
    return Capacity(
        total_blocks=pool.total_blocks,
        free_blocks=pool.free_blocks,
        evictable_blocks=pool.evictable_blocks,
        growable_blocks=pool.base.growable_blocks,
        doomed_blocks=pool.base.doomed_blocks,
        lent_blocks=pool.base.withdrawn_blocks,
        borrowed_blocks=0 if extended is None else extended.borrowed_blocks,
        borrowed_free_blocks=0 if extended is None else extended.borrowed_free_blocks,
    )
