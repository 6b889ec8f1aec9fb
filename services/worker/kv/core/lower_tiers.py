"""The tiers below the device: write-behind, prefetches, preempted blocks, restart and the final flush. Pure.

Nothing waits for these copies. A block may lose its copies or be forgotten during one; then the copied bytes
are dropped and the slot is free again."""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from services.worker.kv.core.block_manager import Inventory
from services.worker.kv.core.load_policy import DROPPED, PEERS, CostGate
from services.worker.kv.core.radix_tree import Node, Tier
from services.worker.kv.core.tier_copier import BlockMover, StoredBlock
from shared.blocks import BlockHash
from shared.messages.reports import CacheReport

Write = Callable[[StoredBlock, Tier, int], bool]
"""Copies a block from a tier and place to its slot on disk; returns whether that worked."""


def _stored(node: Node, place: int) -> StoredBlock:
    return StoredBlock(node.name, b"" if node.parent is None else node.parent.name, node.depth, place)


class WriteBehind:
    """Copies of host blocks to one tier below, oldest first, before they leave the host."""

    def __init__(self, books: Inventory, mover: BlockMover, tier: Tier) -> None:
        self._books = books
        self._mover = mover
        self._tier = tier
        self.open: dict[BlockHash, int] = {}
        """Slots that are being filled, even if lost meanwhile, by name of the block."""

    def start(self, most_blocks: int) -> int:
        """Start up to so many copies; return the number started."""
        waiting, started = self._books.waiting[self._tier], 0
        while waiting and started < most_blocks:
            node = next(iter(waiting))
            is_needed = node.places[Tier.HOST] is not None and node.places[self._tier] is None
            if is_needed and node.name not in self.open:
                if not self._start(node):
                    break
                started += 1
            waiting.pop(node, None)
        return started

    def _start(self, node: Node) -> bool:
        """False also when making room for it evicted the block itself."""
        place = self._books.slot(self._tier)
        if place is None:
            return False
        source, ended = node.places[Tier.HOST], partial(self._ended, node.name, place)
        if source is None or not self._mover.start_write(self._tier, source, _stored(node, place), ended):
            self._books.shelves[self._tier].give(place)
            return False
        self.open[node.name] = place
        return True

    def _ended(self, name: BlockHash, place: int, ok: bool) -> None:
        del self.open[name]
        node, shelf = self._books.tree.find(name), self._books.shelves[self._tier]
        self._books.counts[f"write_failures_{self._tier.name.lower()}"] += not ok
        if ok and place in shelf and node is not None and node.places[self._tier] is None:
            self._books.put(node, self._tier, place)
            self._books.waiting[self._tier].pop(node, None)
            self._books.counts[f"written_{self._tier.name.lower()}"] += 1
            return
        shelf.give(place)
        if place not in shelf and node is not None and node.places[Tier.HOST] is not None:
            self._books.note_unsaved(node)


_FILLING_SHARE = 8
"""The host is filling up when fewer than one slot in so many is free."""
_ASKED_SHARE = 8
"""Each request asks for at least one in so many of the borrowable blocks."""


class PeerKeeping(WriteBehind):
    """The peer tier: host memory lent by other workers, used once the own fills up. Neither filled nor
    enlarged while slower than computing; timed anew once nothing is lent. A lost block is a miss."""

    def __init__(self, books: Inventory, mover: BlockMover, gate: CostGate) -> None:
        super().__init__(books, mover, Tier.PEER)
        self._gate = gate
        self.slots = books.peers

    def wanted_blocks(self) -> int:
        """Return the number of further blocks to borrow now."""
        peers = self.slots
        missing = len(self._books.waiting[Tier.PEER]) - peers.free
        if missing <= 0 or not self._is_of_use():
            return 0
        return max(0, min(peers.most - peers.total, max(missing, peers.most // _ASKED_SHARE)))

    def admit(self, places: Iterable[int], block_s: float = 0.0) -> None:
        """Add lent slots; no number is used twice. `block_s`: measured time per block; 0: unknown."""
        if not self.slots.total or not self._gate.block_s(Tier.PEER):
            self._gate.profile(Tier.PEER, block_s)
        self.slots.admit(places)

    def searched(self, *, found: bool) -> None:
        """Note the result of a search for more slots. Without more, new blocks replace old ones."""
        self.slots.is_refused = not found

    def lose(self, places: Collection[int]) -> None:
        """Drop slots that are no longer lent, and their blocks."""
        self._books.counts["lost_peer"] += self._books.lose_peers(places)

    def retire(self) -> list[int]:
        """Give up and return the empty slots; none while more are wanted."""
        return [] if self.wanted_blocks() else self.slots.retire()

    def start(self, most_blocks: int) -> int:
        return super().start(most_blocks) if self.slots.total and self._is_of_use() else 0

    def _start(self, node: Node) -> bool:
        peers = self.slots
        if not peers.free and peers.total < peers.most and not peers.is_refused:
            return False  # more is being asked for
        return super()._start(node)

    def _is_of_use(self) -> bool:
        host = self._books.host
        if host.free > host.total // _FILLING_SHARE:
            return False
        return not self.slots.total or self._gate.cheapest((PEERS, DROPPED)) is PEERS


class LowerTiers:
    """The tiers of one prefix cache below the device; `counts` are the cache's."""

    def __init__(self, books: Inventory, mover: BlockMover, gate: CostGate, most_kept_blocks: int) -> None:
        self._books = books
        self._most_kept_blocks = most_kept_blocks
        self._mover = mover
        self.has_disk, self.has_peers = books.disk.total > 0, books.peers.most > 0
        self.gate = gate
        self.counts, self.tree = books.counts, books.tree
        self.writes = WriteBehind(books, mover, Tier.DISK)
        self.peers = PeerKeeping(books, mover, gate)
        self.reading: dict[BlockHash, int] = {}
        """Host slots that are being filled from disk."""

    @property
    def kept_blocks(self) -> int:
        """Number of blocks kept for preempted sequences."""
        return self._books.kept

    def report(self) -> CacheReport:
        """Return the cache's part of the heartbeat."""
        host, disk, peers = self._books.host, self._books.disk, self._books.peers
        hits = {f"{name}_hits": self.counts[f"hits_{name}"] for name in _HITS}
        written = {f"{name}_written": self.counts[f"written_{name}"] for name in ("disk", "peer")}
        return CacheReport(
            host_blocks=host.total,
            host_used_blocks=host.total - host.free,
            disk_blocks=disk.total,
            disk_used_blocks=disk.total - disk.free,
            peer_blocks=peers.total,
            peer_used_blocks=peers.used,
            misses=self.counts["misses"],
            **hits,
            host_written=self.counts["saved_ahead"] + self.counts["saved_late"],
            **written,
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
        return kept

    def unkeep(self, nodes: Iterable[Node]) -> None:
        """End `keep` for blocks that came back or never will."""
        for node in reversed(list(nodes)):
            self._books.unkeep(node)

    def prefetch(
        self, names: Sequence[BlockHash], most_blocks: int, needed: Collection[BlockHash] | None = None
    ) -> int:
        """Start to read blocks of this prefix from disk to the host; return the number of reads started. No
        block of `needed` is evicted for it (default: of this prefix). A slow disk is not used."""
        if Tier.DISK in self.gate.losing:
            return 0
        kept = set(names) if needed is None else needed
        started = 0
        for node in self._books.tree.match(names):
            if started >= most_blocks:
                break
            if not node.stored or node.nearest is not Tier.DISK or node.name in self.reading:
                continue
            if not self._start_read(node, kept):
                break
            started += 1
        self.counts["prefetched"] += started
        return started

    def _start_read(self, node: Node, kept: Collection[BlockHash]) -> bool:
        place = self._books.slot(Tier.HOST, kept)
        if place is None:
            return False
        source, ended = node.places[Tier.DISK], partial(self._on_read, node.name, place)
        if source is None or not self._mover.start_read(source, place, node.name, ended):
            self._books.host.give(place)
            return False
        self.reading[node.name] = place
        return True

    def _on_read(self, name: BlockHash, place: int, ok: bool) -> None:
        del self.reading[name]
        node = self._books.tree.find(name)
        if ok and node is not None and node.places[Tier.HOST] is None:
            self._books.put(node, Tier.HOST, place)
        else:
            self._books.host.give(place)
        if not ok and node is not None:
            self._lose(node, Tier.DISK)

    def restore(self, stored: Iterable[StoredBlock]) -> int:
        """Add the disk tier's blocks from an earlier run; return the number of blocks added. Call this first.
        Blocks without their parent, or in slots out of range, are overwritten later."""
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
        """Write blocks worth keeping to disk; return the numbers of blocks written and left out. Nothing may
        be in flight."""
        books = self._books
        kept = self._worth_keeping()
        missing = [node for node in kept if node.places[Tier.DISK] is None]
        spare = sorted(
            (node for node in books.tree if node.places[Tier.DISK] is not None and node not in kept),
            key=lambda node: (-node.used, -node.hits, node.depth),
        )
        written = 0
        for node in missing:
            if not may_go_on():
                break
            place = books.disk.take()
            while place is None and spare:
                victim = spare.pop()
                if victim.places[Tier.DISK] is not None:  # It may have been dropped with another block.
                    books.remove(victim, Tier.DISK)
                place = books.disk.take()
            if place is None:
                break
            source = books.own_place(node)
            if source is not None and write(_stored(node, place), *source):
                books.put(node, Tier.DISK, place)
                books.waiting[Tier.DISK].pop(node, None)
                written += 1
            else:
                books.disk.give(place)
        return written, len(missing) - written

    def _worth_keeping(self) -> dict[Node, None]:
        """Return the most recently used blocks in this worker that fit on disk, parents first."""
        books, kept = self._books, dict[Node, None]()
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
        return kept

    def _lose(self, node: Node, tier: Tier) -> None:
        """Drop an unusable copy of a block."""
        self.counts["copies_lost"] += 1
        if node.places[tier] is not None:
            self._books.remove(node, tier)


_HITS = ("device", "host", "disk", "peer", "borrowed")
