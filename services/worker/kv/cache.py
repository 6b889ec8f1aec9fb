"""The prefix cache of one worker: blocks that outlive their sequences, in three tiers.

It stands where a plain block pool would: `allocate` evicts what nobody uses, `release` keeps what has a name.
A block gets its name when its last token is computed (`publish`) and is shared from then on. Down it goes one
tier at a time, up straight to the device; a lower copy stays as long as there is room for it. Bytes are moved
by a `BlockMover`; what fails there is a miss. Pure. Source: papers/002 §IV; `algorithms.md` §5.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from services.worker.kv.eviction import OrderMaker, order_maker
from services.worker.kv.gate import CostGate
from services.worker.kv.inventory import Inventory
from services.worker.kv.mover import BlockMover, Load, Loaded, Store, StoredBlock
from services.worker.kv.pool import BlockPool
from services.worker.kv.tree import Node, Tier
from shared.blocks import BlockHash


@dataclass(frozen=True, slots=True)
class Hit:
    """The beginning of a prompt that need not be computed: its blocks, now held by who asked."""

    blocks: tuple[int, ...] = ()
    loaded: tuple[int, int, int] = (0, 0, 0)
    """Blocks by the tier they were found in."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """How much the lower tiers take, in blocks; 0 is a tier that is not there."""

    host_blocks: int = 0
    disk_blocks: int = 0
    eviction: str = "frequent"
    seed: int = 0


class PrefixCache:
    """Named blocks of one worker. One thread; requests are counted, no clock is read.

    `counts`, in blocks: hits_…, misses, evicted_…, dropped, lost_unsaved, copies_lost, write_failures,
    prefetched; loads_abandoned.
    """

    def __init__(
        self,
        pool: BlockPool,
        tiers: Tiers,
        mover: BlockMover,
        gate: CostGate,
        orders: OrderMaker | None = None,
    ) -> None:
        """`orders` instead of `tiers.eviction`: for experiments. Raises ConfigError for an unknown order."""
        make = orders or order_maker(tiers.eviction, tiers.seed)
        self._books = Inventory(pool, tiers.host_blocks, tiers.disk_blocks, make)
        self._pool = pool
        self._mover = mover
        self.gate = gate
        self.counts = self._books.counts

    @property
    def total_blocks(self) -> int:
        return self._pool.total_blocks

    @property
    def block_tokens(self) -> int:
        return self._pool.block_tokens

    @property
    def free_blocks(self) -> int:
        """Empty; `evictable_blocks` come on top."""
        return self._pool.free_blocks

    @property
    def evictable_blocks(self) -> int:
        """Named and used by nobody."""
        return self._books.evictable

    def can_allocate(self, blocks: int) -> bool:
        return blocks <= self._pool.free_blocks + self.evictable_blocks

    def allocate(self, blocks: int) -> list[int]:
        """Ids of that many blocks, evicting what must go. Raises ValueError, and takes none, if it cannot."""
        if blocks < 0 or not self.can_allocate(blocks):
            raise ValueError(
                f"{blocks} asked for, {self.free_blocks} free, {self.evictable_blocks} evictable"
            )
        stores: list[Store] = []
        while self._pool.free_blocks < blocks:
            stores += self._evict_from_device()
        if stores:
            self.gate.on_filled(Tier.HOST, self._mover.store(stores))
        return self._pool.allocate(blocks)

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back, deepest first where they are named. Raises ValueError on one that is not held."""
        for block in reversed(list(blocks)):
            node = self._books.node_of(block)
            if node is None:
                self._pool.release([block])
            else:
                self._books.let_go(node)

    def acquire(self, names: Sequence[BlockHash], most_blocks: int) -> Hit:
        """Hold the longest stored prefix of `names`, at most so many blocks, on the device.

        What lies deeper is loaded as far as that is worth it, and given up where a load fails or lags.
        """
        self._books.requests += 1
        found = self._books.tree.match(names)[:most_blocks]
        for node in reversed(found):
            self._books.touch(node)
        near = next((i for i, node in enumerate(found) if node.places[Tier.DEVICE] is None), len(found))
        for node in found[:near]:
            self._books.hold(node)
        self.gate.on_loaded(Tier.DEVICE, near, 0.0)
        loaded = self._load(found[near:])
        tiers = Counter([Tier.DEVICE] * near + loaded)
        for tier in Tier:
            self.counts[f"hits_{tier.name.lower()}"] += tiers[tier]
        self.counts["misses"] += len(names) - near - len(loaded)
        blocks = tuple(_block_of(node) for node in found[: near + len(loaded)])
        return Hit(blocks, (tiers[Tier.DEVICE], tiers[Tier.HOST], tiers[Tier.DISK]))

    def publish(self, block: int, name: BlockHash, parent: BlockHash | None) -> bool:
        """A held block is full and has a name. False when it stays private: that name is stored already, or
        nobody could find it because what precedes it is not."""
        tree = self._books.tree
        before = None if parent is None else tree.find(parent)
        if self._books.node_of(block) is not None or (parent is not None and before is None):
            return False
        if before is not None and before.places[Tier.DEVICE] is None:
            return False
        node = tree.find(name)
        if node is not None and node.places[Tier.DEVICE] is not None:
            return False
        node = node or self._books.enter(name, before)
        self._books.hold(node)
        self._books.put(node, Tier.DEVICE, block)
        return True

    def prefetch(
        self, names: Sequence[BlockHash], most_blocks: int, needed: Collection[BlockHash] | None = None
    ) -> int:
        """Start bringing what of this prefix lies on disk alone to the host; returns how many reads began.
        Nothing of `needed` goes for it (default: of this prefix)."""
        kept = set(names) if needed is None else needed
        started = 0
        for node in self._books.tree.match(names):
            source = node.places[Tier.DISK]
            if started >= most_blocks:
                break
            if source is None or node.nearest is not Tier.DISK or node.busy:
                continue
            self._books.hold(node)
            place = self._books.slot(Tier.HOST, kept)
            if place is None or not self._mover.start_read(source, place, node.name):
                if place is not None:
                    self._books.host.give(place)
                self._books.let_go(node)
                break
            started += 1
        self.counts["prefetched"] += started
        return started

    def on_read(self, name: BlockHash, place: int, *, ok: bool) -> None:
        """A read that `prefetch` began is over."""
        node = self._held(name)
        if ok and node.places[Tier.HOST] is None:
            self._books.put(node, Tier.HOST, place)
        else:
            self._books.host.give(place)
        if not ok:
            self._lose(node, Tier.DISK)
        self._books.let_go(node)

    def save(self, most_blocks: int) -> int:
        """Start writing what only the host holds to disk, oldest first; returns how many writes began."""
        unsaved = self._books.unsaved
        started = 0
        while unsaved and started < most_blocks:
            node = next(iter(unsaved))
            source = node.places[Tier.HOST]
            if source is None or node.places[Tier.DISK] is not None:
                del unsaved[node]
                continue
            self._books.hold(node)  # so that the slot is not made free at its own cost
            place = self._books.slot(Tier.DISK)
            parent = b"" if node.parent is None else node.parent.name
            if place is None or not self._mover.start_write(
                source, StoredBlock(node.name, parent, node.depth, place)
            ):
                if place is not None:
                    self._books.disk.give(place)
                self._books.let_go(node)
                break
            del unsaved[node]
            started += 1
        return started

    def on_written(self, name: BlockHash, place: int, *, ok: bool) -> None:
        """A write to disk is over; until then the host's copy stayed."""
        node = self._held(name)
        if not ok or node.places[Tier.DISK] is not None:
            self._books.disk.give(place)
            self.counts["write_failures"] += not ok
        else:
            self._books.put(node, Tier.DISK, place)
        self._books.let_go(node)

    def restore(self, stored: Iterable[StoredBlock]) -> int:
        """Take over what a disk tier has from an earlier run; returns how many blocks can be found again.

        To be called before anything else. What has lost its beginning, or lies in a slot that this cache does
        not have, is left to be overwritten.
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

    def check_integrity(self, held: Iterable[int]) -> None:
        """See `Inventory.check_integrity`."""
        self._books.check_integrity(held)

    def _held(self, name: BlockHash) -> Node:
        """A node that a copy in flight keeps."""
        node = self._books.tree.find(name)
        assert node is not None, "a block was forgotten while it was copied"
        return node

    def _load(self, nodes: Sequence[Node]) -> list[Tier]:
        """Bring as many of these, in order, to the device as is worth it, held; returns where each was."""
        nodes = nodes[: self.gate.worth_loading([node.nearest for node in nodes])]
        for node in nodes:
            self._books.hold(node)
        usable = min(len(nodes), self._pool.free_blocks + self.evictable_blocks)
        blocks = self.allocate(usable)
        loads = [_load_of(node, block) for node, block in zip(nodes, blocks, strict=False)]
        loaded = self._mover.load(loads, self.gate.most_s(usable)) if loads else Loaded(0)
        for node, block in zip(nodes[: loaded.done], blocks, strict=False):
            self._books.put(node, Tier.DEVICE, block)
        self._pool.release(blocks[loaded.done :])
        self._learn(loads, loaded)
        if loaded.failed:
            self._lose(nodes[loaded.done], loads[loaded.done].tier)
        for node in reversed(nodes[loaded.done :]):
            self._books.let_go(node)
        return [load.tier for load in loads[: loaded.done]]

    def _learn(self, loads: Sequence[Load], loaded: Loaded) -> None:
        tiers = [load.tier for load in loads]
        for tier, elapsed_s in zip(Tier, loaded.elapsed_s, strict=True):
            self.gate.on_loaded(tier, tiers[: loaded.done].count(tier), elapsed_s)
        if loaded.done < len(loads):
            self.gate.on_wasted(tiers[loaded.done], loaded.wasted_s, abandoned=not loaded.failed)
            self.counts["loads_abandoned"] += not loaded.failed

    def _lose(self, node: Node, tier: Tier) -> None:
        """A copy of a held block turned out to be unusable."""
        self.counts["copies_lost"] += 1
        if node.places[tier] is not None:
            self._books.remove(node, tier)

    def _evict_from_device(self) -> list[Store]:
        """Frees a block; what has to be copied before it is used."""
        node = self._books.pop_device()
        assert node is not None, "nothing to evict although blocks were counted as evictable"
        stores: list[Store] = []
        if node.places[Tier.HOST] is None:
            place = self._books.slot(Tier.HOST)
            if place is not None:
                stores = [Store(node.name, _block_of(node), place)]
                self._books.put(node, Tier.HOST, place)
        self._books.remove(node, Tier.DEVICE)
        self.counts["evicted_device"] += 1
        return stores


def _block_of(node: Node) -> int:
    block = node.places[Tier.DEVICE]
    assert block is not None
    return block


def _load_of(node: Node, block: int) -> Load:
    place = node.places[node.nearest]
    assert place is not None
    return Load(node.name, node.nearest, place, block)
