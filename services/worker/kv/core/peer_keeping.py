"""The peer tier of the prefix cache: host memory lent by other workers. Pure.

The tier is used once the own host memory fills up: blocks are copied to peers' slots, oldest first, before
they leave the host. A hit is loaded as from disk, and a block lost with its creditor is a miss. The tier is
neither filled nor enlarged while it is slower than computing.
"""

from collections.abc import Collection, Iterable

from services.worker.kv.core.block_manager import Inventory
from services.worker.kv.core.load_policy import CostGate
from services.worker.kv.core.radix_tree import Node, Tier
from services.worker.kv.core.tier_copier import BlockMover, StoredBlock
from shared.blocks import BlockHash

_FILLING_SHARE = 8
"""The host is filling up when fewer than one slot in so many is free."""
_ASKED_SHARE = 8
"""Each request asks for at least one in so many of the borrowable blocks."""


class PeerKeeping:
    """The peer tier of one cache, for the thread that owns it."""

    def __init__(self, books: Inventory, mover: BlockMover, gate: CostGate) -> None:
        self._books = books
        self._mover = mover
        self._gate = gate
        self._sending: dict[BlockHash, int] = {}
        """Slots by name of the block that is being sent."""

    @property
    def most_blocks(self) -> int:
        """Maximum number of borrowed blocks; 0: there is no such tier."""
        return self._books.peers.most

    @property
    def total_blocks(self) -> int:
        """Number of blocks lent to this cache now."""
        return self._books.peers.total

    @property
    def used_blocks(self) -> int:
        return self._books.peers.total - self._books.peers.free

    @property
    def sending(self) -> Iterable[int]:
        """Slots that are being filled, even if lost meanwhile."""
        return self._sending.values()

    def wanted_blocks(self) -> int:
        """Return the number of further blocks to borrow now."""
        peers = self._books.peers
        missing = len(self._books.unsent) - peers.free
        if missing <= 0 or not self._is_of_use():
            return 0
        return max(0, min(peers.most - peers.total, max(missing, peers.most // _ASKED_SHARE)))

    def admit(self, places: Iterable[int], block_s: float = 0.0) -> None:
        """Add lent slots; no number is used twice. `block_s`: measured time per block; 0: unknown."""
        self._books.peers.admit(places)
        if not self._gate.block_s(Tier.PEER):
            self._gate.profile(Tier.PEER, block_s)

    def searched(self, *, found: bool) -> None:
        """Note the result of a search for more slots. Without more, new blocks replace old ones."""
        self._books.peers.is_refused = not found

    def lose(self, places: Collection[int]) -> None:
        """Drop slots that are no longer lent, and their blocks."""
        self._books.counts["lost_peer"] += self._books.lose_peers(places)

    def retire(self) -> list[int]:
        """Give up and return the empty slots; none while more are wanted."""
        return [] if self.wanted_blocks() else self._books.peers.retire()

    def send(self, most_blocks: int) -> int:
        """Start to copy blocks to peers, oldest first; return the number started."""
        if not self.total_blocks or not self._is_of_use():
            return 0
        unsent = self._books.unsent
        started = 0
        while unsent and started < most_blocks:
            node = next(iter(unsent))
            if node.places[Tier.HOST] is None or node.places[Tier.PEER] is not None:
                del unsent[node]
                continue
            if node.name not in self._sending:
                if not self._start(node):
                    break
                started += 1
            unsent.pop(node, None)
        return started

    def on_sent(self, name: BlockHash, place: int, *, ok: bool) -> None:
        """Apply the end of a copy that `send` started."""
        self._sending.pop(name, None)
        node, peers = self._books.tree.find(name), self._books.peers
        self._books.counts["send_failures"] += not ok
        if ok and place in peers and node is not None and node.places[Tier.PEER] is None:
            self._books.put(node, Tier.PEER, place)
            self._books.unsent.pop(node, None)
            self._books.counts["sent"] += 1
            return
        peers.give(place)
        is_lost = place not in peers
        if is_lost and node is not None and node.places[Tier.HOST] is not None:
            self._books.note_unsaved(node)

    def _is_of_use(self) -> bool:
        host = self._books.host
        return host.free <= host.total // _FILLING_SHARE and Tier.PEER not in self._gate.losing

    def _start(self, node: Node) -> bool:
        """False also when making room for it evicted the block itself."""
        peers = self._books.peers
        if not peers.free and peers.total < peers.most and not peers.is_refused:
            return False  # more is being asked for
        place = self._books.slot(Tier.PEER)
        source = node.places[Tier.HOST]
        if place is None or source is None:
            if place is not None:
                peers.give(place)
            return False
        parent = b"" if node.parent is None else node.parent.name
        if not self._mover.start_send(source, StoredBlock(node.name, parent, node.depth, place)):
            peers.give(place)
            return False
        self._sending[node.name] = place
        return True
