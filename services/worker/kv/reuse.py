"""How blocks are used again: the mean gap between two uses, and how often dropped blocks had been used.

A conversation's next turn comes minutes later, often after its blocks were evicted; an order of eviction
that forgets them then sees only uses that were quick enough for the cache it already has. So the names of
dropped blocks are remembered, as in ARC and 2Q ("ghosts"): 16 bytes and two numbers each. Pure. Gaps and
times are in requests.
"""

from services.worker.kv.tree import Node
from shared.blocks import BlockHash

_LEAST_WEIGHT = 0.0005
"""Of one use in the mean gap; the first uses weigh more."""


class ReuseHistory:
    """Of one cache, over all tiers."""

    def __init__(self, most_ghosts: int = 65536) -> None:
        self._most_ghosts = most_ghosts
        self._ghosts: dict[BlockHash, tuple[int, int]] = {}
        """Uses and last use of blocks stored nowhere, the one dropped first first."""
        self._uses = 0
        self.mean_gap = 0.0

    def on_used(self, last: int, now: int) -> None:
        """A block that was last used then is used again."""
        self._uses += 1
        self.mean_gap += max(_LEAST_WEIGHT, 1 / self._uses) * (now - last - self.mean_gap)

    def on_dropped(self, node: Node) -> None:
        """The block is stored nowhere any more."""
        self._ghosts[node.name] = (node.hits, node.used)
        if len(self._ghosts) > self._most_ghosts:
            del self._ghosts[next(iter(self._ghosts))]

    def on_stored(self, node: Node, now: int) -> None:
        """A new node; it starts with the uses it had when it was dropped, and this one."""
        node.inserted = node.used = now
        known = self._ghosts.pop(node.name, None)
        if known is not None:
            hits, last = known
            self.on_used(last, now)
            node.hits = hits + 1
