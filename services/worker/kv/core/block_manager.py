"""The inventory of the prefix cache: which block is stored where, in use, and evictable. Pure.

Blocks and slots are conserved, a block in use keeps its prefix, and nothing in use is evicted. The inventory
moves no bytes and decides only which copy to evict."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.eviction import OrderMaker, PeerSlots, ReuseHistory, SlotPool, group_of
from services.worker.kv.core.grown_pool import GrownPool
from services.worker.kv.core.radix_tree import Node, PrefixTree, Tier
from services.worker.kv.core.shadows import Shadows
from shared.blocks import BlockHash


@dataclass(frozen=True, slots=True)
class Tiers:
    """Sizes of the lower tiers in blocks; 0: there is no such tier."""

    host_blocks: int = 0
    disk_blocks: int = 0
    eviction: str = "frequent"
    kept_blocks: int = 0
    """Maximum number of host blocks for preempted sequences."""
    shadow_blocks: int = 0
    """Maximum number of host blocks for sequences that run on other workers."""
    peer_blocks: int = 0
    """Maximum number of blocks in other workers' host memory."""


_LEAST_GHOSTS, _MOST_GHOSTS = 1024, 65_536
"""Bounds of the number of dropped blocks whose uses are known: 8 for each block that there is room for."""


class Inventory:
    """The tree of named blocks, the device's pool, the lower tiers' slots, and the orders of eviction."""

    def __init__(self, pool: BlockPool, tiers: Tiers, make: OrderMaker) -> None:
        self.pool = pool
        self.residency = pool.residency if isinstance(pool, GrownPool) else None
        """Where blocks in use lie, if they may lie in host memory; None: all are on the device."""
        self.tree = PrefixTree()
        blocks = pool.ids + tiers.host_blocks + tiers.disk_blocks + tiers.peer_blocks
        self.history = ReuseHistory(min(_MOST_GHOSTS, max(_LEAST_GHOSTS, 8 * blocks)))
        self.device = make(Tier.DEVICE, self.history)
        rows = None if self.residency is None else self.residency.rows
        self.host = SlotPool(tiers.host_blocks, make(Tier.HOST, self.history), rows)
        self.disk = SlotPool(tiers.disk_blocks, make(Tier.DISK, self.history))
        self.peers = PeerSlots(tiers.peer_blocks, make(Tier.PEER, self.history))
        self.shelves: dict[Tier, SlotPool | PeerSlots] = {
            Tier.HOST: self.host,
            Tier.DISK: self.disk,
            Tier.PEER: self.peers,
        }
        self._saved = make(Tier.DEVICE, self.history)
        """Evictable device blocks that the host has too: they can leave without a copy."""
        self._orders = (self.device, self.host.order, self.disk.order, self.peers.order)
        self.orders = (*self._orders, self._saved)
        self._by_tier = tuple(zip(Tier, self._orders, strict=True))
        self.shadows = Shadows(self, min(tiers.shadow_blocks, self.host.total))
        """Shadows on the host. They are in no order and are evicted first."""
        self._published: dict[int, Node] = {}
        self.waiting: dict[Tier, dict[Node, None]] = {Tier.DISK: {}, Tier.PEER: {}}
        """Blocks on the host that are not on disk, or at a peer, yet; oldest first."""
        self.requests = 0
        self.evictable = 0
        """Number of own device blocks that have a name and no user."""
        self.borrowed_idle = 0
        """Number of borrowed blocks that have a name and no user; their ids are above all own ids."""
        self.saved = 0
        """Number of evictable blocks that the host has too."""
        self.is_behind = False
        """A block had to leave the device before its copy to the host. Its reader clears it."""
        self.keeps_unused = True
        """Blocks without a second use are worth a copy on the host."""
        self.kept = 0
        """Number of blocks whose place on the host is reserved."""
        self.counts: Counter[str] = Counter()
        self.on_borrowed_free: list[Callable[[int], None]] = []
        """Called with each borrowed block that lost its name."""
        self.end_copy: Callable[[Node], None] = lambda node: None
        """Called to finish the copy to the host of a block that leaves the device."""

    def node_of(self, block: int) -> Node | None:
        """Return the named block at this device block id."""
        return self._published.get(block)

    def is_own(self, node: Node) -> bool:
        """Whether its device block is this worker's own; a borrowed block cannot be copied from."""
        place = node.places[Tier.DEVICE]
        return place is not None and place < self.pool.ids

    def own_place(self, node: Node) -> tuple[Tier, int] | None:
        """Return its nearest place in this worker; None: its bytes are only elsewhere."""
        for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK):
            place = node.places[tier]
            if place is not None and (tier is not Tier.DEVICE or self.is_own(node)):
                return tier, place
        return None

    def rename(self, node: Node, block: int) -> None:
        """Move its device copy to another block id; the old id is nobody's."""
        self._count(node, -1)
        before = self.tree.take(node, Tier.DEVICE)
        del self._published[before]
        self.tree.put(node, Tier.DEVICE, block)
        self._published[block] = node
        self._count(node, 1)
        self._share(node)
        self.rank(node)

    def idle_borrowed(self) -> list[Node]:
        """Return borrowed blocks with a name and no user, least recently used and deepest first."""
        idle = [node for block, node in self._published.items() if block >= self.pool.ids and not node.busy]
        return sorted(idle, key=lambda node: (node.used, -node.depth))

    def enter(self, name: BlockHash, parent: Node | None, tenant: str = "") -> Node:
        """Return a new node, which needs a place at once."""
        node = self.tree.add(name, parent)
        node.tenant = tenant
        self.history.on_stored(node, self.requests)
        return node

    def touch(self, node: Node) -> None:
        """Note that a request uses the block."""
        if node.is_shadow:
            self.make_own(node)
        else:
            self.history.on_used(node.used, self.requests)
            node.used = self.requests
            if not node.hits:
                self.history.on_returned()
        node.hits += 1
        self.rank(node)

    def hold(self, node: Node | None) -> None:
        """Add a user; the first one also holds the blocks before it."""
        while node is not None:
            if node.busy:
                node.busy += 1
                return
            self._count(node, -1)
            node.busy = 1
            node.is_leaving = False
            self.rank(node)
            node = node.parent

    def let_go(self, node: Node | None) -> None:
        """Remove a user. Raises ValueError when it had none."""
        gone = None
        while node is not None:
            if node.busy < 1:
                raise ValueError("a block without a user was released")
            node.busy -= 1
            if node.busy > 0:
                break
            self._count(node, 1)
            self.rank(node)
            above = node.parent
            is_there = node.places[Tier.DEVICE] is not None
            if is_there and above is not None and above.places[Tier.DEVICE] is None:
                self.clear_below(node)
                self._give(Tier.DEVICE, self._take(node, Tier.DEVICE), node)
            gone = gone if node.stored else node
            node = node.parent
        if gone is not None:
            self._drop_if_gone(gone)

    def keep(self, node: Node) -> bool:
        """Reserve its place on the host for a preempted sequence. False when there is no room."""
        if not node.keepers and node.places[Tier.HOST] is None:
            node.kept_slot = self.slot(Tier.HOST)
            if node.kept_slot is None:
                return False
        self.kept += not node.keepers
        node.keepers += 1
        self.rank(node)
        return True

    def unkeep(self, node: Node) -> None:
        """Undo one `keep`. A node that was forgotten since then is ignored."""
        if self.tree.find(node.name) is not node or not node.keepers:
            return
        node.keepers -= 1
        self.kept -= not node.keepers
        if not node.keepers:
            self._give_kept_slot(node)
            self.rank(node)

    def host_slot(self, node: Node, *, ahead: bool = False) -> int | None:
        """Return a host slot for a block that leaves the device: its reserved slot, else any. `ahead` of
        eviction, no slot is taken from another block that is about to leave."""
        place, node.kept_slot = node.kept_slot, None
        if place is not None:
            return place
        if ahead and not self.host.free and not self.shadows:
            first = self.host.order.first()
            if first is None or first.is_leaving:
                return None
        return self.slot(Tier.HOST)

    def give_host_slot(self, node: Node, place: int) -> None:
        """Give back a slot from `host_slot` that was not filled."""
        if node.keepers and node.kept_slot is None and node.places[Tier.HOST] is None:
            node.kept_slot = place
        else:
            self.host.give(place)

    def own_row(self, node: Node) -> int | None:
        """Return the host row with the node's device block, if only the block owns it."""
        block = node.places[Tier.DEVICE]
        return None if self.residency is None or block is None else self.residency.saved_row(block)

    def adopt(self, node: Node) -> bool:
        """Count the block's own row as its copy on the host. False: the host has no slot for it."""
        place = self.host_slot(node)
        if place is None:
            return False
        self.host.rows.release([place])
        self.counts["adopted"] += 1
        return True

    def put(self, node: Node, tier: Tier, place: int) -> None:
        """Record a copy of `node` in a tier."""
        if node.is_shadow and tier is not Tier.HOST:
            self.make_own(node)
        self._count(node, -1)
        self.tree.put(node, tier, place)
        self._count(node, 1)
        if tier is Tier.HOST:
            self._give_kept_slot(node)
        if tier is Tier.DEVICE:
            self._published[place] = node
        self._share(node)
        if tier is Tier.HOST:
            self.note_unsaved(node)
        elif tier is Tier.PEER:
            self.peers.at[place] = node
        self._rank_with_parent(node)

    def make_own(self, node: Node) -> None:
        """Turn a shadow into an ordinary cached block, stored now: a sequence here uses it."""
        self.shadows.discard(node)
        self.history.on_stored(node, self.requests)
        self.counts["shadows_used"] += 1
        self.note_unsaved(node)
        self.rank(node)

    def note_unsaved(self, node: Node) -> None:
        """Queue a block on the host for the tiers below."""
        for tier, waiting in self.waiting.items():
            if self.shelves[tier].most and node.places[tier] is None and not node.is_shadow:
                waiting[node] = None

    def lose_peers(self, places: Collection[int]) -> int:
        """Drop slots that are no longer lent; return the number of blocks lost with them."""
        lost = self.peers.drop(places)
        for node in lost:
            if node.places[Tier.PEER] is not None:  # It may have been dropped with another block.
                self.remove(node, Tier.PEER)
            if node.places[Tier.HOST] is not None:
                self.note_unsaved(node)
        return len(lost)

    def remove(self, node: Node, tier: Tier) -> None:
        """Remove its copy in `tier`; a block without any copy is forgotten."""
        self._give(tier, self._take(node, tier), node)
        self._drop_if_gone(node)

    def pop_device(self) -> Node | None:
        """Return the next device block to evict, still in its place; None when all are in use. A block that
        the host has too goes before one that still needs a copy."""
        node = self.device.pop()
        if node is None or node.places[Tier.HOST] is not None or not self.is_worth_a_copy(node):
            return node
        self.is_behind = True
        saved = self._saved.pop()
        if saved is None:
            return node
        self.rank(node)
        return saved

    def is_worth_a_copy(self, node: Node) -> bool:
        """Whether to copy it to the host before eviction: it was used twice, or `keeps_unused` is set."""
        if not self.host.total or not self.is_own(node):
            return False
        has_below = self.disk.total or self.peers.most
        return self.keeps_unused or bool(node.hits or node.keepers or has_below)

    def slot(self, tier: Tier, kept: Collection[BlockHash] = (), *, for_shadow: bool = False) -> int | None:
        """Return a slot of a lower tier, evicting a copy outside `kept` if necessary; None: no copy may go.
        `for_shadow`: evict neither a shadow nor a block that is about to leave the device."""
        shelf = self.shelves[tier]
        free = shelf.take()
        if free is not None or shelf.total == 0:
            return free
        shadow = None if for_shadow or tier is not Tier.HOST else self.shadows.victim(kept)
        victim = shadow or self._pop(shelf, kept)
        if victim is None:
            return None
        if for_shadow and victim.is_leaving:
            self.rank(victim)
            return None
        if victim in self.waiting[Tier.DISK]:
            self.counts["lost_unsaved"] += 1
        self._give(tier, self._take(victim, tier), victim)
        self.counts[f"evicted_{tier.name.lower()}"] += 1
        self._drop_if_gone(victim)
        return shelf.take()

    def check_integrity(
        self,
        held: Iterable[int],
        pinned: Iterable[Node] = (),
        arriving: Iterable[int] = (),
        storing: Iterable[int] = (),
        writing: Iterable[int] = (),
        sending: Iterable[int] = (),
    ) -> None:
        """Raise AssertionError unless blocks and slots are conserved and counts are true. `held` has each
        block as often as sequences hold it, `pinned` each awaited or loaded node likewise. `arriving`: device
        blocks being filled; `storing`, `writing`, `sending`: slots of host, disk, peers."""
        self.tree.check_integrity()
        held = list(held)
        pins = Counter(pinned)
        private = [block for block in held if block not in self._published]
        assert len(private) == len(set(private)), "a private block is shared"
        own = [block for block in self._published if block < self.pool.ids]
        self.pool.check_integrity([*private, *own, *arriving])
        self.shadows.check_integrity(self.tree)
        users = Counter(block for block in held if block in self._published)
        for block, node in self._published.items():
            assert node.places[Tier.DEVICE] == block
            kept = sum(child.busy > 0 for child in node.children.values())
            assert node.busy == users[block] + pins[node] + kept, "users of a block are miscounted"
        idle = [node for node in self._published.values() if node.busy == 0]
        loose = [node for node in idle if self.is_own(node)]
        assert (self.evictable, self.borrowed_idle) == (len(loose), len(idle) - len(loose))
        assert self.saved == sum(node.places[Tier.HOST] is not None for node in loose)
        on_way = {Tier.HOST: list(storing), Tier.DISK: list(writing)}
        at_peers = [place for node in self.tree if (place := node.places[Tier.PEER]) is not None]
        self.peers.check_integrity([*at_peers, *(place for place in sending if place in self.peers)])
        assert all(self.peers.at[place].places[Tier.PEER] == place for place in at_peers)
        for tier, shelf in ((Tier.HOST, self.host), (Tier.DISK, self.disk)):
            places = [place for node in self.tree if (place := node.places[tier]) is not None]
            aside = [place for node in self.tree if (place := node.kept_slot) is not None]
            used = [*places, *on_way[tier], *(aside if tier is Tier.HOST else ())]
            shelf.check_integrity(used)
            if shelf is self.disk or self.residency is None:
                shelf.rows.check_integrity(used)
            else:
                self.residency.check_rows(used)
        assert self.kept == sum(node.keepers > 0 for node in self.tree)
        for node in self.tree:
            at, is_kept = node.places[Tier.DEVICE], node.places[Tier.HOST] is not None
            if self.residency is not None:
                lies_outside = at is not None and at < self.pool.ids and self.residency.is_outside(at)
                assert node.is_outside == (lies_outside and is_kept)
            assert node.kept_slot is None or (node.keepers and node.places[Tier.HOST] is None)
            for tier, order in self._by_tier:
                is_ranked = node.is_loose(tier) and not node.is_shadow
                assert (node in order) == is_ranked, "the order of eviction is out of step"
            assert (node in self._saved) == (
                node.is_loose(Tier.DEVICE) and node.places[Tier.HOST] is not None and self.is_own(node)
            )
        waiting = [node for each in self.waiting.values() for node in each]
        assert all(node.places[Tier.HOST] is not None for node in waiting), "nothing to save"

    def rank(self, node: Node) -> None:
        """Rank it again in each order of eviction, after a change."""
        if node.busy and not node.is_shadow:
            for order in self.orders:
                order.discard(node)
            return
        for tier, order in self._by_tier:
            if node.is_loose(tier) and not node.is_shadow:
                order.add(node, group_of(node, tier))
            else:
                order.discard(node)
        is_saved = node.places[Tier.HOST] is not None and node.is_loose(Tier.DEVICE) and self.is_own(node)
        (self._saved.add if is_saved else self._saved.discard)(node)
        if node.is_shadow:
            self.shadows.rank(node)

    def _count(self, node: Node, by: int) -> None:
        """Add a block to, or subtract it from, the counts of evictable blocks."""
        if node.busy or node.places[Tier.DEVICE] is None:
            return
        if self.is_own(node):
            self.evictable += by
            self.saved += by * (node.places[Tier.HOST] is not None)
        else:
            self.borrowed_idle += by

    def _rank_with_parent(self, node: Node) -> None:
        for each in (node, node.parent):
            if each is not None and (not each.busy or each.is_shadow):  # A block in use is in no order.
                self.rank(each)

    def on_moved_block(self, block: int) -> None:
        """Note that a block whose host row is shared left or entered the device."""
        node = self._published.get(block)
        if node is not None and self.residency is not None:
            node.is_outside = self.residency.is_outside(block)
            self.rank(node)

    def _share(self, node: Node) -> None:
        """Share the host row with the device block, so that it can leave the device without a copy."""
        block, row = node.places[Tier.DEVICE], node.places[Tier.HOST]
        residency = self.residency if self.is_own(node) else None
        if residency is not None and row is not None and block is not None:
            residency.share(block, row)
            node.is_outside = residency.is_outside(block)

    def _take(self, node: Node, tier: Tier) -> int:
        if tier is Tier.DEVICE and node.storing:
            self.end_copy(node)
        self._count(node, -1)
        place = self.tree.take(node, tier)
        if tier is Tier.DEVICE:
            node.is_outside = node.is_leaving = False
        self._count(node, 1)
        if tier is Tier.HOST:
            for waiting in self.waiting.values():
                waiting.pop(node, None)
            if node.is_shadow:
                self.counts["shadows_dropped"] += self.shadows.discard(node)
        self._rank_with_parent(node)
        return place

    def _give(self, tier: Tier, place: int, node: Node) -> None:
        if tier is Tier.DEVICE:
            del self._published[place]
            if place < self.pool.ids:
                self.pool.release([place])
            else:
                for hear in self.on_borrowed_free:
                    hear(place)
        elif tier is Tier.HOST:
            block, node.is_outside = node.places[Tier.DEVICE], False
            residency = self.residency if self.is_own(node) else None
            if residency is not None and block is not None and residency.unshare(block):
                self.host.used -= 1  # Its block in use keeps the row.
            else:
                self.host.give(place)
        else:
            self.shelves[tier].give(place)

    def _give_kept_slot(self, node: Node) -> None:
        if node.kept_slot is not None:
            self.host.give(node.kept_slot)
            node.kept_slot = None

    def _pop(self, shelf: SlotPool | PeerSlots, kept: Collection[BlockHash]) -> Node | None:
        spared: list[Node] = []
        victim = shelf.order.pop()
        while victim is not None and victim.name in kept:
            spared.append(victim)
            victim = shelf.order.pop()
        for node in spared:
            self.rank(node)
        return victim

    def clear_below(self, node: Node) -> None:
        """Remove unused device copies below a node."""
        for lost in reversed(self.tree.below(node)):
            if lost.places[Tier.DEVICE] is not None and not lost.busy:
                self.remove(lost, Tier.DEVICE)

    def _drop_if_gone(self, node: Node) -> None:
        """Forget a block that is stored nowhere, and everything below it."""
        if node.stored or node.busy:
            return
        for lost in [*reversed(self.tree.below(node)), node]:
            for tier in Tier:
                if lost.places[tier] is not None:
                    self._give(tier, self._take(lost, tier), lost)
            self._give_kept_slot(lost)
            self.kept -= lost.keepers > 0
            self.tree.forget(lost)
            self.history.on_dropped(lost)
            self.counts["dropped"] += 1
