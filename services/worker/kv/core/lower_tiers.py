"""The tiers below the device: prefetches, write-behind, restart and the final flush. Pure.

Nothing waits for these copies. A block may lose its copies or be forgotten during one; then the copied bytes
are dropped and the slot is free again.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from services.worker.kv.core.block_manager import Inventory
from services.worker.kv.core.kv_events import PrefixNews
from services.worker.kv.core.load_policy import CostGate
from services.worker.kv.core.radix_tree import Node, Tier
from services.worker.kv.core.stored_events import StoredEvents
from services.worker.kv.core.tier_copier import BlockMover, StoredBlock
from shared.blocks import BlockHash
from shared.messages.reports import CacheReport

Write = Callable[[StoredBlock, Tier, int], bool]
"""Copies a block from a tier and place to its slot on disk; returns whether that worked."""


def worth_keeping(books: Inventory) -> list[Node]:
    """Return the most recently used blocks in this worker that fit on disk, parents first."""
    kept: dict[Node, None] = {}
    stored = (node for node in books.tree if books.own_place(node) is not None and not node.is_shadow)
    for node in sorted(stored, key=lambda node: (-node.used, -node.hits, node.depth)):
        path: list[Node] = []
        above: Node | None = node
        while above is not None and above not in kept:
            path.append(above)
            above = above.parent
        is_whole = all(books.own_place(one) is not None for one in path)
        if is_whole and len(kept) + len(path) <= books.disk.total:
            kept.update(dict.fromkeys(reversed(path)))
    return list(kept)


def flush(books: Inventory, write: Write, may_go_on: Callable[[], bool]) -> tuple[int, int]:
    """Write blocks worth keeping to disk; return the numbers of blocks written and left out.

    Nothing may be in flight."""
    kept = worth_keeping(books)
    missing = [node for node in kept if node.places[Tier.DISK] is None]
    spare = sorted(
        (node for node in books.tree if node.places[Tier.DISK] is not None and node not in set(kept)),
        key=lambda node: (node.used, node.hits, -node.depth),
        reverse=True,
    )
    written = 0
    for node in missing:
        if not may_go_on():
            break
        place = _slot(books, spare)
        if place is None:
            break
        source = books.own_place(node)
        parent = b"" if node.parent is None else node.parent.name
        if source is not None and write(StoredBlock(node.name, parent, node.depth, place), *source):
            books.put(node, Tier.DISK, place)
            books.unsaved.pop(node, None)
            written += 1
        else:
            books.disk.give(place)
    return written, len(missing) - written


def _slot(books: Inventory, spare: list[Node]) -> int | None:
    """Return a free disk slot, else the slot of the least of `spare`."""
    place = books.disk.take()
    while place is None and spare:
        victim = spare.pop()
        if victim.places[Tier.DISK] is not None:  # It may have been dropped with another block.
            books.remove(victim, Tier.DISK)
        place = books.disk.take()
    return place


class LowerTiers:
    """The host and disk tiers of one prefix cache; `counts` are the cache's."""

    def __init__(self, books: Inventory, mover: BlockMover, gate: CostGate, most_kept_blocks: int) -> None:
        self._books = books
        self._most_kept_blocks = most_kept_blocks
        self._mover = mover
        self.has_disk, self.has_peers = books.disk.total > 0, books.peers.most > 0
        self.gate = gate
        self.counts = books.counts
        self._reading: dict[BlockHash, int] = {}
        """Host slots that are being filled from disk."""
        self._writing: dict[BlockHash, int] = {}
        """Disk slots that are being written."""

    @property
    def is_reading(self) -> bool:
        """Whether prefetches are in flight."""
        return bool(self._reading)

    @property
    def kept_blocks(self) -> int:
        """Number of blocks kept for preempted sequences."""
        return self._books.kept

    def report(self) -> CacheReport:
        """Return the cache's part of the heartbeat."""
        host, disk, counts = self._books.host, self._books.disk, self.counts
        return CacheReport(
            host_blocks=host.total,
            host_used_blocks=host.total - host.free,
            disk_blocks=disk.total,
            disk_used_blocks=disk.total - disk.free,
            peer_blocks=self._books.peers.total,
            peer_used_blocks=self._books.peers.total - self._books.peers.free,
            device_hits=counts["hits_device"],
            host_hits=counts["hits_host"],
            disk_hits=counts["hits_disk"],
            peer_hits=counts["hits_peer"],
            borrowed_hits=counts["hits_borrowed"],
            misses=counts["misses"],
        )

    @property
    def keepable_blocks(self) -> int:
        """Number of further blocks that could be kept."""
        return max(0, self._most_kept_blocks - self._books.kept)

    def keep(self, names: Sequence[BlockHash]) -> list[Node]:
        """Reserve places on the host for device blocks of a preempted sequence, as far as there is room.

        `unkeep` ends it."""
        kept: list[Node] = []
        for name in names:
            node = self._books.tree.find(name)
            has_room = node is not None and (node.keepers > 0 or self.keepable_blocks > 0)
            if node is None or node.places[Tier.DEVICE] is None or not has_room or not self._books.keep(node):
                break
            kept.append(node)
        self.counts["kept"] += len(kept)
        return kept

    def unkeep(self, nodes: Iterable[Node]) -> None:
        """End `keep` for blocks that came back or never will."""
        for node in reversed(list(nodes)):
            self._books.unkeep(node)

    def tell(self, worker_id: str, incarnation: int) -> PrefixNews:
        """Return the events for placement, from what is stored now on."""
        return PrefixNews(self._books.tree, worker_id, incarnation)

    def tell_outside(self, block_tokens: int) -> StoredEvents:
        """Return the events for external readers."""
        return StoredEvents(self._books.tree, block_tokens)

    def prefetch(
        self, names: Sequence[BlockHash], most_blocks: int, needed: Collection[BlockHash] | None = None
    ) -> int:
        """Start to read blocks of this prefix from disk to the host; return the number of reads started.

        No block of `needed` is evicted for it (default: of this prefix). A disk that is slower than computing
        is not used.
        """
        if Tier.DISK in self.gate.losing:
            return 0
        kept = set(names) if needed is None else needed
        started = 0
        for node in self._books.tree.match(names):
            if started >= most_blocks:
                break
            if not node.stored or node.nearest is not Tier.DISK or node.name in self._reading:
                continue
            if not self._start_read(node, kept):
                break
            started += 1
        self.counts["prefetched"] += started
        return started

    def on_read(self, name: BlockHash, place: int, *, ok: bool) -> None:
        """Apply the end of a read that `prefetch` started."""
        self._reading.pop(name, None)
        node = self._books.tree.find(name)
        if ok and node is not None and node.places[Tier.HOST] is None:
            self._books.put(node, Tier.HOST, place)
        else:
            self._books.host.give(place)
        if not ok and node is not None:
            self._lose(node, Tier.DISK)

    def save(self, most_blocks: int) -> int:
        """Start to write blocks from the host to disk, oldest first; return the number of writes started."""
        unsaved = self._books.unsaved
        started = 0
        while unsaved and started < most_blocks:
            node = next(iter(unsaved))
            if node.places[Tier.HOST] is None or node.places[Tier.DISK] is not None:
                del unsaved[node]
                continue
            if node.name not in self._writing and not self._start_write(node):
                break
            unsaved.pop(node, None)
            started += 1
        return started

    def on_written(self, name: BlockHash, place: int, *, ok: bool) -> None:
        """Apply the end of a write to disk."""
        self._writing.pop(name, None)
        node = self._books.tree.find(name)
        self.counts["write_failures"] += not ok
        if ok and node is not None and node.places[Tier.DISK] is None:
            self._books.put(node, Tier.DISK, place)
            self._books.unsaved.pop(node, None)
        else:
            self._books.disk.give(place)

    def restore(self, stored: Iterable[StoredBlock]) -> int:
        """Add the disk tier's blocks from an earlier run; return the number of blocks added.

        Call this first. Blocks without their parent, or in slots out of range, are overwritten later.
        """
        taken: list[int] = []
        for block in sorted(stored, key=lambda block: block.depth):
            parent = self._books.tree.find(block.parent) if block.depth else None
            if self._books.tree.find(block.name) is not None or block.place >= self._books.disk.total:
                continue
            if block.depth != (0 if parent is None else parent.depth + 1):
                continue
            self._books.put(self._books.enter(block.name, parent), Tier.DISK, block.place)
            taken.append(block.place)
        self._books.disk.claim(taken)
        return len(taken)

    def flush(self, write: Write, may_go_on: Callable[[], bool]) -> tuple[int, int]:
        """Write blocks worth keeping at the end; see `flush` above."""
        return flush(self._books, write, may_go_on)

    def _start_read(self, node: Node, kept: Collection[BlockHash]) -> bool:
        place = self._books.slot(Tier.HOST, kept)
        if place is None:
            return False
        source = node.places[Tier.DISK]
        if source is None or not self._mover.start_read(source, place, node.name):
            self._books.host.give(place)
            return False
        self._reading[node.name] = place
        return True

    def _start_write(self, node: Node) -> bool:
        """False also when making room for it evicted the block itself."""
        place = self._books.slot(Tier.DISK)
        if place is None:
            return False
        source = node.places[Tier.HOST]
        parent = b"" if node.parent is None else node.parent.name
        stored = StoredBlock(node.name, parent, node.depth, place)
        if source is None or not self._mover.start_write(source, stored):
            self._books.disk.give(place)
            return False
        self._writing[node.name] = place
        return True

    def _lose(self, node: Node, tier: Tier) -> None:
        """Drop an unusable copy of a block."""
        self.counts["copies_lost"] += 1
        if node.places[tier] is not None:
            self._books.remove(node, tier)
