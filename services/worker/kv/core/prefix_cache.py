"""The prefix cache of one worker: blocks that outlive their sequences, in up to four tiers.

It stands where a plain block pool would: `allocate` evicts what nobody uses, `release` keeps what has a name.
A block gets its name when its last token is computed (`publish`) and is shared from then on. Down it goes
one tier at a time, up straight to the device; a lower copy stays as long as there is room for it. Bytes are
moved by a `BlockMover` while the engine computes; what fails there is a miss. A load has its blocks of the
device to itself until it is answered, so who waits for it may give up at any time. Pure.
Source: papers/002 §IV; `algorithms.md` §5.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.worker.kv.core.arrivals import Awaited, Hit
from services.worker.kv.core.block_manager import Inventory
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.eviction import EvictionOrder, OrderMaker, ReuseHistory, order_maker
from services.worker.kv.core.load_policy import CostGate
from services.worker.kv.core.lower_tiers import LowerTiers
from services.worker.kv.core.peer_keeping import PeerKeeping
from services.worker.kv.core.radix_tree import Node, Tier
from services.worker.kv.core.save_ahead import SaveAhead, block_of
from services.worker.kv.core.shadow_keeping import ShadowKeeping
from services.worker.kv.core.tier_copier import BlockMover, Load, Loaded, Store
from shared.blocks import BlockHash


@dataclass(frozen=True, slots=True)
class Tiers:
    """How much the lower tiers take, in blocks; 0 is a tier that is not there."""

    host_blocks: int = 0
    disk_blocks: int = 0
    eviction: str = "frequent"
    seed: int = 0
    kept_blocks: int = 0
    """Of the host's, at most so many for sequences that were taken off the device."""
    shadow_blocks: int = 0
    """Of the host's, at most so many for sequences that run on other workers."""
    peer_blocks: int = 0
    """Of other workers' host memory, at most so many."""


class PrefixCache(LowerTiers):
    """Named blocks of one worker. One thread; requests are counted, no clock is read.

    `counts`, in blocks: hits_… (hits_borrowed: of those of the device), misses, evicted_…, dropped,
    lost_unsaved, copies_lost, write_failures, prefetched, saved_ahead, saved_late (the engine waited for that
    copy), not_saved (left the device without one, since few like it come back), adopted (Pie had it on the
    host already); loads_abandoned; shadows_used, shadows_dropped; sent, send_failures, lost_peer (with its
    creditor).
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
        self._made: list[EvictionOrder] = []

        def kept(tier: Tier, history: ReuseHistory) -> EvictionOrder:
            self._made.append(make(tier, history))
            return self._made[-1]

        books = Inventory(pool, tiers.host_blocks, tiers.disk_blocks, kept, tiers.peer_blocks)
        super().__init__(books, mover, gate, min(tiers.kept_blocks, tiers.host_blocks))
        self._pool = pool
        self.ids = pool.ids
        """All own block ids are below this."""
        self.block_tokens = pool.block_tokens
        self.on_moved_block = books.on_moved_block
        self._ahead = SaveAhead(books, mover)
        self.shadows = ShadowKeeping(books, tiers.shadow_blocks)
        self.peers = PeerKeeping(books, mover, gate)
        self._waits: dict[Awaited, None] = {}
        self._loads: dict[int, list[tuple[Node, Load]]] = {}
        """By ticket: the blocks it fills are its own until it is answered, whoever still waits for them."""
        self._tickets = 0

    @property
    def trouble(self) -> str:
        """Return the last error of an eviction order from outside; empty: there is none."""
        failed = [order for order in self._made if order.fault]
        times = sum(order.faults for order in failed)
        return f"{failed[0].fault}; {times} blocks are ordered by their last use instead" if failed else ""

    @property
    def total_blocks(self) -> int:
        return self._pool.total_blocks

    @property
    def free_blocks(self) -> int:
        """Empty; `evictable_blocks` come on top."""
        return self._pool.free_blocks

    @property
    def evictable_blocks(self) -> int:
        """Named and used by nobody."""
        return self._books.evictable

    @property
    def growable_blocks(self) -> int:
        return self._pool.growable_blocks

    @property
    def doomed_blocks(self) -> int:
        return self._pool.doomed_blocks

    @property
    def withdrawn_blocks(self) -> int:
        """Lent to another worker, and not in `total_blocks`."""
        return self._pool.withdrawn_blocks

    @property
    def lendable_blocks(self) -> int:
        return self._pool.lendable_blocks

    def withdraw(self, blocks: Iterable[int]) -> list[int]:
        """These, allocated before and without a name, leave the pool: see there. Raises ValueError on
        others."""
        blocks = list(blocks)
        if any(self._books.node_of(block) is not None for block in blocks):
            raise ValueError("a block that has a name cannot be withdrawn")
        return self._pool.withdraw(blocks)

    def readmit(self, places: Iterable[int]) -> None:
        """What is there comes back, free. Raises ValueError on one that had not left."""
        self._pool.readmit(places)

    def rejoin(self, places: Iterable[int]) -> list[int]:
        """What is there comes back, taken and without a name: its ids. Raises ValueError on one that had not
        left."""
        return self._pool.rejoin(places)

    def can_allocate(self, blocks: int) -> bool:
        return blocks <= self._pool.free_blocks + self.evictable_blocks

    def allocate(self, blocks: int) -> list[int]:
        """Ids of that many blocks, evicting what must go. Raises ValueError, and takes none, if it cannot."""
        if blocks < 0 or not self.can_allocate(blocks):
            raise ValueError(
                f"{blocks} asked for, {self.free_blocks} free, {self.evictable_blocks} evictable"
            )
        while self._pool.free_blocks < blocks:
            self._evict_from_device()
        return self._pool.allocate(blocks)

    def shed(self, blocks: int) -> None:
        """Up to so many that nobody uses leave the device."""
        for _ in range(min(blocks, self.evictable_blocks)):
            self._evict_from_device()

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back, deepest first where they are named. Raises ValueError on one that is not held."""
        for block in reversed(list(blocks)):
            node = self._books.node_of(block)
            if node is None:
                self._pool.release([block])
            else:
                self._books.let_go(node)

    def acquire(
        self, names: Sequence[BlockHash], most_blocks: int, first_block: int = 0, *, may_load: bool = True
    ) -> Hit:
        """Hold the longest stored prefix of `names`, at most so many blocks in all.

        What lies deeper than the device is loaded as far as that is worth it, or awaited where it is being
        loaded already; neither unless it `may_load`. With `first_block` the caller has all before that
        already, and holds what follows it.
        """
        self._books.requests += first_block == 0
        chain = self._books.tree.match(names)
        found = chain[first_block:most_blocks]
        if first_block and found and chain[first_block - 1].places[Tier.DEVICE] is None:
            found = []
        for node in reversed(found):
            self._books.touch(node)
        near = next((i for i, node in enumerate(found) if node.places[Tier.DEVICE] is None), len(found))
        for node in found[:near]:
            self._books.hold(node)
        self.gate.on_loaded(Tier.DEVICE, near, 0.0)
        far = found[near:]
        lost = next((i for i, node in enumerate(far) if node.places[Tier.DEVICE] is not None), len(far))
        awaited = self._send_for(far[:lost]) if may_load else None
        done = near + (0 if awaited is None else len(awaited.nodes))
        self.counts["hits_device"] += near
        self.counts["hits_borrowed"] += sum(not self._books.is_own(node) for node in found[:near])
        self.counts["misses"] += max(0, min(len(names), most_blocks) - first_block - done)
        blocks = tuple(block_of(node) for node in found[:near])
        ahead = len(chain) - first_block - done if done and done == len(found) else 0
        return Hit(blocks, (near, 0, 0), awaited, ahead=ahead)

    def collect(self, awaited: Awaited) -> Hit:
        """Ends a wait: what has come of it, from the first on, is held by who waited; the rest by nobody. Its
        loads go on where they have not ended."""
        del self._waits[awaited]
        came = next((at for at, node in enumerate(awaited.nodes) if not _is_near(node)), len(awaited.nodes))
        for node in reversed(awaited.nodes[came:]):
            self._books.let_go(node)
        tiers = Counter(awaited.tiers[:came])
        for tier in Tier:
            self.counts[f"hits_{tier.name.lower()}"] += tiers[tier]
        self.counts["misses"] += len(awaited.nodes) - came
        blocks = tuple(block_of(node) for node in awaited.nodes[:came])
        loaded = (tiers[Tier.DEVICE], tiers[Tier.HOST], tiers[Tier.DISK])
        return Hit(blocks, loaded, from_peers=tiers[Tier.PEER])

    def on_loaded(self, ticket: int, loaded: Loaded) -> None:
        """A load has ended: what it brought is on the device, and blocks that it did not fill are free."""
        pairs = self._loads.pop(ticket)
        for at, (node, load) in enumerate(pairs):
            node.arriving = False
            is_reachable = node.parent is None or _is_near(node.parent)
            if at < loaded.done and is_reachable and not _is_near(node):
                self._books.put(node, Tier.DEVICE, load.block)
            else:
                self._pool.release([load.block])
        self._learn([load for _, load in pairs], loaded)
        if loaded.failed:
            node, load = pairs[loaded.done]
            self._lose(node, load.tier)
        for node, _ in reversed(pairs):
            self._books.let_go(node)

    @property
    def arriving_blocks(self) -> int:
        """Of the device, that are being loaded into: neither free nor evictable, and no sequence's yet."""
        return sum(len(pairs) for pairs in self._loads.values())

    def save_ahead(self) -> int:
        """Start copying to the host what is about to leave the device and is worth it; returns how many
        copies began."""
        returning = self._books.history.returning
        self._books.keeps_unused = self.gate.worth_storing(Tier.HOST, returning)
        return self._ahead.work()

    def on_stored(self, ticket: int, *, ok: bool) -> None:
        """A copy that `save_ahead` began is over."""
        self._ahead.on_stored(ticket, ok=ok)

    def known_blocks(self, names: Sequence[BlockHash]) -> int:
        """How many of these, from the first on, are on the device. Nobody holds them."""
        count = 0
        for node in self._books.tree.match(names):
            if node.places[Tier.DEVICE] is None:
                break
            count += 1
        return count

    def hold(self, names: Sequence[BlockHash]) -> list[int]:
        """Consecutive blocks that are on the own device, up to the first that is not; to be given back by
        `release`. `names` need not begin a sequence."""
        held: list[int] = []
        for name in names:
            node = self._books.tree.find(name)
            if node is None or not self._books.is_own(node):
                break
            self._books.hold(node)
            held.append(block_of(node))
        return held

    def publish(self, block: int, name: BlockHash, parent: BlockHash | None, tenant: str = "") -> bool:
        """A held block is full and has a name, and `tenant` is charged for it. False when it stays private:
        that name is stored already, or nobody could find it because what precedes it is not."""
        tree = self._books.tree
        before = None if parent is None else tree.find(parent)
        if self._books.node_of(block) is not None or (parent is not None and before is None):
            return False
        if before is not None and before.places[Tier.DEVICE] is None:
            return False
        node = tree.find(name)
        if node is not None and node.places[Tier.DEVICE] is not None:
            return False
        node = node or self._books.enter(name, before, tenant)
        if node.is_shadow:
            node.tenant = tenant
        self._books.hold(node)
        self._books.put(node, Tier.DEVICE, block)
        return True

    # --- borrowed blocks: ids from `ids` on, whose bytes are at a creditor's

    def on_borrowed_free(self, hear: Callable[[int], None]) -> None:
        """`hear` is called with each borrowed block that had a name, and has none any more."""
        self._books.on_borrowed_free = hear

    def has_name(self, block: int) -> bool:
        """Whether it is found by others."""
        return self._books.node_of(block) is not None

    def borrowed(self, names: Sequence[BlockHash]) -> list[int]:
        """Consecutive blocks that creditors hold, up to the first that is not one; nobody's hold on them."""
        found: list[int] = []
        for name in names:
            node = self._books.tree.find(name)
            if node is None or node.places[Tier.DEVICE] is None or self._books.is_own(node):
                break
            found.append(block_of(node))
        return found

    @property
    def idle_borrowed_blocks(self) -> int:
        """Named and used by nobody."""
        return self._books.borrowed_idle

    def is_idle(self, block: int) -> bool:
        """Named and used by nobody."""
        node = self._books.node_of(block)
        return node is not None and not node.busy

    def forget_borrowed(self, blocks: int, spared: Collection[int] = ()) -> None:
        """So many that nobody uses, `spared` ones not counted, lose their names, and with them what hangs on
        them."""
        for node in self._books.idle_borrowed():
            if blocks < 1:
                return
            if node.places[Tier.DEVICE] is None or block_of(node) in spared:
                continue
            for lost in [*reversed(self._books.tree.below(node)), node]:
                if lost.places[Tier.DEVICE] is not None:
                    blocks -= not self._books.is_own(lost) and block_of(lost) not in spared
                    self._take_off(lost)

    def lose_borrowed(self, blocks: Iterable[int]) -> None:
        """Their creditor is gone. No sequence has them any more; a load may hang on them still."""
        for block in blocks:
            node = self._books.node_of(block)
            if node is not None:
                self._books.drop_place(node)

    def rename(self, moves: Mapping[int, int]) -> None:
        """What was in a borrowed block is in an own one, which is taken."""
        for block, own in moves.items():
            node = self._books.node_of(block)
            if node is not None:
                self._books.rename(node, own)

    def verify(self, block: int, is_intact: Callable[[int, BlockHash], bool]) -> bool:
        """Whether the copy on the host, by slot and name, of what lies in `block` is as it was. If not, it is
        lost."""
        node = self._books.node_of(block)
        place = None if node is None else node.places[Tier.HOST]
        if node is None or place is None or is_intact(place, node.name):
            return True
        self._lose(node, Tier.HOST)
        return False

    def condemn(self, block: int) -> None:
        """What is stored there is wrong: it, and what was computed from it, is forgotten wherever it lies,
        but for what somebody has or is being copied."""
        node = self._books.node_of(block)
        if node is None:
            return
        for wrong in [*reversed(self._books.tree.below(node)), node]:
            if wrong.busy or wrong.arriving or wrong.storing or wrong.keepers:
                continue
            for tier in Tier:
                if wrong.is_loose(tier):
                    self._books.remove(wrong, tier)

    def forget_unused(self) -> tuple[int, list[int]]:
        """Forget every block, in all tiers, but for what a sequence has, here or elsewhere, what comes before
        that, and what is being copied to or from the device. How many, and the slots of disk they had."""
        spared: set[Node] = set()
        blocks, slots = 0, list[int]()
        for node in sorted(self._books.tree, key=lambda node: -node.depth):
            is_used = node.busy or node.keepers or node.is_shadow or node.arriving or node.storing
            if node in spared or is_used:
                if node.parent is not None:
                    spared.add(node.parent)
                continue
            slot, blocks = node.places[Tier.DISK], blocks + 1
            slots += [] if slot is None else [slot]
            for tier in Tier:
                if node.is_loose(tier):
                    self._books.remove(node, tier)
        return blocks, slots

    def check_integrity(self, held: Iterable[int]) -> None:
        """AssertionError unless blocks and slots are conserved; `held` are those that sequences hold, as
        often as they hold them."""
        loads = [pair for pairs in self._loads.values() for pair in pairs]
        awaited = [node for wait in self._waits for node in wait.nodes]
        assert all(node.arriving for node, _ in loads), "a load is on the way to nothing"
        self._books.check_integrity(
            held,
            [*awaited, *(node for node, _ in loads)],
            [load.block for _, load in loads],
            [*self._ahead.slots, *self._reading.values(), *self.shadows.open_places],
            self._writing.values(),
            self.peers.sending,
        )

    def _send_for(self, nodes: Sequence[Node]) -> Awaited | None:
        """Wait for as many of these, in order, as are on the way or worth being loaded; held."""
        count = next((at for at, node in enumerate(nodes) if not node.arriving), len(nodes))
        on_way, rest = list(nodes[:count]), list(nodes[count:])
        count = next((at for at, node in enumerate(rest) if node.arriving), len(rest))
        rest = self._start_load(rest[:count])
        awaited = [*on_way, *rest]
        if not awaited:
            return None
        for node in awaited:
            self._books.hold(node)
        made = Awaited(tuple(awaited), tuple(node.nearest for node in awaited))
        self._waits[made] = None
        return made

    def _start_load(self, nodes: Sequence[Node]) -> list[Node]:
        """Bring as many of these, in order, to the device as is worth it; those that are on the way now."""
        nodes = nodes[: self.gate.worth_loading([node.nearest for node in nodes])]
        for node in nodes:
            self._books.hold(node)
        usable = min(len(nodes), self._pool.free_blocks + self.evictable_blocks)
        blocks = self.allocate(usable)
        loads = [_load_of(node, block) for node, block in zip(nodes, blocks, strict=False)]
        begun: list[Node] = []
        if loads and self._mover.start_load(self._tickets + 1, loads, self.gate.most_s(usable)):
            begun = list(nodes[:usable])
            self._tickets += 1
            self._loads[self._tickets] = list(zip(begun, loads, strict=True))
            for node in begun:
                node.arriving = True
        else:
            self._pool.release(blocks)
        for node in reversed(nodes[len(begun) :]):
            self._books.let_go(node)
        return begun

    def _learn(self, loads: Sequence[Load], loaded: Loaded) -> None:
        tiers = [load.tier for load in loads]
        for tier, elapsed_s in zip(Tier, loaded.elapsed_s, strict=False):
            self.gate.on_loaded(tier, tiers[: loaded.done].count(tier), elapsed_s)
        if loaded.done < len(loads):
            self.gate.on_wasted(tiers[loaded.done], loaded.wasted_s, abandoned=not loaded.failed)
            self.counts["loads_abandoned"] += not loaded.failed

    def _evict_from_device(self) -> None:
        """Frees a block. What nobody has copied yet is copied before: the pool may forget what is free."""
        is_own = False
        while not is_own:  # a borrowed block may hang on the first that is own
            node = self._books.pop_device()
            assert node is not None, "nothing to evict although blocks were counted as evictable"
            is_own = self._books.is_own(node)
            self._take_off(node)

    def _take_off(self, node: Node) -> None:
        """The device has it no more."""
        self._ahead.finish(node)
        is_missing = node.places[Tier.HOST] is None and self._books.is_own(node)
        is_worth_it = self._books.is_worth_a_copy(node)
        self.counts["not_saved"] += is_missing and not is_worth_it and self._books.host.total > 0
        if is_missing and is_worth_it and not self._ahead.adopt(node):
            place = self._books.host_slot(node)
            if place is not None:
                took_s = self._mover.store([Store(node.name, block_of(node), place)])
                self.gate.on_filled(Tier.HOST, took_s)
                self._books.put(node, Tier.HOST, place)
                self.counts["saved_late"] += 1
        self._books.remove(node, Tier.DEVICE)
        self.counts["evicted_device"] += 1


def _is_near(node: Node) -> bool:
    return node.places[Tier.DEVICE] is not None


def _load_of(node: Node, block: int) -> Load:
    place = node.places[node.nearest]
    assert place is not None
    return Load(node.name, node.nearest, place, block)
