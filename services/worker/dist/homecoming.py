"""KV comes home: borrowed blocks are copied into own ones, and sequences use those from then on.

On the engine's thread, between two steps. A copy may be made a while before the exchange: what was written to
meanwhile is copied again. Decides nothing. Source: `algorithms.md` §4 (DGFM, repayment).
"""

from collections.abc import Callable, Iterable, Sequence

from services.worker.dist.debtor import Debtor
from services.worker.dist.watch import Place
from services.worker.kv.extended import ExtendedPool

Pair = tuple[int, int]
"""A borrowed block, and the own one that its KV goes to: withdrawn, nobody else's."""


class Homecoming:
    """One debtor's. `forget`: these ids are borrowed no more."""

    def __init__(self, debtor: Debtor, pool: ExtendedPool, forget: Callable[[Iterable[int]], None]) -> None:
        self._debtor = debtor
        self._pool = pool
        self._forget = forget

    def copy(self, pairs: Sequence[Pair]) -> int:
        """Of those that a sequence uses; how many. Raises CreditorLost."""
        used = self._used(pairs)
        placed = zip(self._places(used), used, strict=True)
        self._debtor.watch.restart({place: own for place, (_, own) in placed})
        self._debtor.bring_home(used)
        return len(used)

    def swap(self, pairs: Sequence[Pair]) -> list[int]:
        """Returns own blocks that nobody needs: still withdrawn. Raises CreditorLost, and swaps nothing."""
        used, watch = self._used(pairs), self._debtor.watch
        placed = zip(self._places(used), used, strict=True)
        self._debtor.bring_home([pair for place, pair in placed if not watch.is_copy(place, pair[1])])
        watch.restart({})
        spare = self._pool.come_home(pairs)
        self._forget([there for there, _ in pairs])
        return spare

    def recall(self, blocks: Sequence[int], most_blocks: int, keep_blocks: int) -> list[int]:
        """Brings up to so many of these, in order, that a sequence uses into free own blocks, and leaves
        `keep_blocks` of those. Returns which. Raises CreditorLost: then all are whose they were."""
        own = self._pool.own
        room = own.free_blocks + own.evictable_blocks - keep_blocks
        chosen = self._pool.set_apart(self._pool.are_used(blocks), min(most_blocks, room))
        if not chosen:
            return []
        home = own.allocate(len(chosen))
        own.withdraw(home)
        self._debtor.watch.restart({})
        try:
            spare = self.swap(list(zip(chosen, home, strict=True)))
        except BaseException:
            own.readmit(home)
            self._pool.rejoin(chosen)  # Also those of creditors that live: nobody else would ever do it.
            raise
        own.readmit(spare)
        return chosen

    def _used(self, pairs: Sequence[Pair]) -> list[Pair]:
        used = set(self._pool.are_used([there for there, _ in pairs]))
        return [pair for pair in pairs if pair[0] in used]

    def _places(self, pairs: Sequence[Pair]) -> list[Place]:
        holders, blocks = self._debtor.homes.locate([there for there, _ in pairs])
        return list(zip(holders.tolist(), blocks.tolist(), strict=True))
