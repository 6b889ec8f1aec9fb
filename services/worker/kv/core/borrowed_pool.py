"""A worker's own KV blocks and, behind them, those that it has borrowed. Pure bookkeeping of ids.

Own blocks go first: attention over them costs no message. Borrowed ids lie above the own ones, are handed in
once they can be reached, and may be lost at any time. Where the own pool is a prefix cache, borrowed blocks
have names as well: they are shared, and stay when their sequence has ended, until they are needed or go home.
Knows neither creditors nor grants.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from services.worker.kv.core.prefix_cache import PrefixCache
from shared.messages.reports import Capacity


class Pool(Protocol):
    """What a table of sequences asks of its blocks."""

    @property
    def block_tokens(self) -> int: ...

    @property
    def total_blocks(self) -> int: ...

    @property
    def free_blocks(self) -> int: ...

    @property
    def evictable_blocks(self) -> int: ...

    @property
    def growable_blocks(self) -> int: ...

    @property
    def doomed_blocks(self) -> int: ...

    @property
    def withdrawn_blocks(self) -> int: ...

    def can_allocate(self, blocks: int) -> bool: ...

    def allocate(self, blocks: int) -> list[int]:
        """Raises ValueError, and takes none, when there are fewer."""
        ...

    def release(self, blocks: Iterable[int]) -> None:
        """Raises ValueError on one that is not taken."""
        ...

    def check_integrity(self, held: Iterable[int]) -> None: ...


class OwnPool(Pool, Protocol):
    """A worker's own blocks, some of which may be withdrawn: lent, or kept to copy into."""

    @property
    def lendable_blocks(self) -> int: ...

    def withdraw(self, blocks: Iterable[int]) -> list[int]:
        """Where they are in the engine's memory, and stay."""
        ...

    def readmit(self, places: Iterable[int]) -> None:
        """What was withdrawn comes back, free."""
        ...

    def rejoin(self, places: Iterable[int]) -> list[int]:
        """What was withdrawn comes back, taken: its ids."""
        ...


class ExtendedPool:
    """`own` has ids below `own_blocks`, for ever; the borrowed ones come and go."""

    def __init__(self, own: OwnPool, own_blocks: int) -> None:
        self.own = own
        self.own_blocks = own_blocks
        self.block_tokens = own.block_tokens
        self.on_moved: Callable[[Mapping[int, int]], None] = lambda _: None
        """Who holds blocks is told that they are called otherwise from now on."""
        self._free: dict[int, None] = {}
        self._used: set[int] = set()
        """By sequences, or by the cache."""
        self._apart: set[int] = set()
        """About to come home: nobody gets them anew. Those in use are in `_used`, too."""
        self._cache = own if isinstance(own, PrefixCache) else None
        if self._cache is not None:
            self._cache.on_borrowed_free(self._set_free)

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
        """Borrowed, with a name, and used by no sequence, nor on the way home."""
        if self._cache is None:
            return 0
        return self._cache.idle_borrowed_blocks - sum(self._cache.is_idle(block) for block in self._apart)

    @property
    def growable_blocks(self) -> int:
        return self.own.growable_blocks

    @property
    def doomed_blocks(self) -> int:
        return self.own.doomed_blocks

    @property
    def withdrawn_blocks(self) -> int:
        return self.own.withdrawn_blocks

    @property
    def borrowed_blocks(self) -> int:
        return len(self._free) + len(self._used)

    @property
    def borrowed_free_blocks(self) -> int:
        """No sequence has them."""
        return len(self._free) + self.cached_blocks

    def can_allocate(self, blocks: int) -> bool:
        return blocks <= self.free_blocks + self.evictable_blocks

    def allocate(self, blocks: int) -> list[int]:
        """Own ones as far as there are. Raises ValueError, and takes none, when there are fewer."""
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
        """Borrowed ones that were lost meanwhile are passed over. Raises ValueError on one that is free."""
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
        """These are borrowed and can be reached. Raises ValueError for own ids, or those that are here."""
        for block in blocks:
            if block < self.own_blocks or block in self._free or block in self._used:
                raise ValueError(f"block {block} is here already")
            self._free[block] = None

    def retire(self, most_blocks: int, *, cached: bool = True) -> list[int]:
        """Up to so many borrowed blocks that no sequence has leave, those that came last first; those with a
        name after the others, or, unless `cached`, not at all."""
        if cached:
            self._clear(most_blocks)
        leaving = list(self._free)[::-1][: max(0, most_blocks)]
        for block in leaving:
            del self._free[block]
        return leaving

    def lose(self, blocks: Iterable[int]) -> None:
        """These are gone, whoever uses them. Unknown ones are not minded."""
        blocks = list(blocks)
        if self._cache is not None:
            self._cache.lose_borrowed(blocks)
        self._drop(blocks)

    def set_apart(self, blocks: Iterable[int], most_blocks: int) -> list[int]:
        """Up to so many of these stay whose they are, or nobody's, until `rejoin` or `come_home`: first those
        that are used. Unknown ones, and those set apart already, are passed over."""
        known = [block for block in blocks if block not in self._apart]
        used = [block for block in known if block in self._used]
        chosen = [*used, *(block for block in known if block in self._free)][: max(0, most_blocks)]
        self._apart.update(chosen)
        for block in chosen:
            self._free.pop(block, None)
        return chosen

    def rejoin(self, blocks: Iterable[int]) -> None:
        """Ends `set_apart`. Those that were lost meanwhile are passed over."""
        for block in blocks:
            if block in self._apart:
                self._apart.discard(block)
                if block not in self._used:
                    self._free[block] = None

    def are_used(self, blocks: Iterable[int]) -> list[int]:
        """Those of them that somebody has."""
        return [block for block in blocks if block in self._used]

    def come_home(self, pairs: Iterable[tuple[int, int]]) -> list[int]:
        """(Set apart, place of an own, withdrawn one): who uses the first has the second from now on, with
        what is in it.

        The first are borrowed no more. Returns places that are not needed: still withdrawn."""
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
        """AssertionError unless `held` is what is taken, each once."""
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
        """So many are free, if need be without the names that they had."""
        missing = blocks - len(self._free)
        if missing > 0 and self._cache is not None:
            self._cache.forget_borrowed(missing, self._apart)

    def _drop(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._free.pop(block, None)
            self._used.discard(block)
            self._apart.discard(block)


def capacity_of(pool: Pool) -> Capacity:
    """As a heartbeat tells it."""
    extended = pool if isinstance(pool, ExtendedPool) else None
    return Capacity(
        total_blocks=pool.total_blocks,
        free_blocks=pool.free_blocks,
        evictable_blocks=pool.evictable_blocks,
        growable_blocks=pool.growable_blocks,
        doomed_blocks=pool.doomed_blocks,
        lent_blocks=pool.withdrawn_blocks,
        borrowed_blocks=0 if extended is None else extended.borrowed_blocks,
        borrowed_free_blocks=0 if extended is None else extended.borrowed_free_blocks,
    )
