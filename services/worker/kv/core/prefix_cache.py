"""The prefix cache of one worker: blocks that outlive their sequences, in up to four tiers. Pure.

It replaces a plain block pool: `allocate` evicts unused blocks, and `release` keeps named ones. A block is
named and shared once its last token is computed (`publish`). Blocks move down one tier at a time, and up
straight to the device; a lower copy stays while there is room. A `BlockMover` copies bytes while the engine
computes, and a failed copy is a miss. A load owns its device blocks until it is answered, so a waiting
sequence may give up at any time. Source: papers/002 §IV; `algorithms.md` §5."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from services.worker.kv.core.block_manager import Inventory, Tiers
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.eviction import OrderMaker, order_maker
from services.worker.kv.core.load_policy import DROPPED, HOST, CostGate
from services.worker.kv.core.lower_tiers import LowerTiers
from services.worker.kv.core.radix_tree import Node, Tier
from services.worker.kv.core.save_ahead import SaveAhead, block_of
from services.worker.kv.core.tier_copier import Awaited, BlockMover, Hit, Load, Loaded, Store
from shared.blocks import BlockHash


class PrefixCache(LowerTiers):
    """The named blocks of one worker, for one thread. It counts requests instead of reading a clock.
    `counts`, in blocks: hits_TIER (hits_borrowed is part of hits_device), misses, evicted_TIER, written_TIER,
    write_failures_TIER, copies_lost, lost_peer (its creditor left) and those of `figures.OVERALL`."""

    def __init__(
        self,
        pool: BlockPool,
        tiers: Tiers,
        mover: BlockMover,
        gate: CostGate,
        orders: OrderMaker | None = None,
    ) -> None:
        """`orders` replaces `tiers.eviction` in experiments. Raises ConfigError for an unknown order."""
        books = Inventory(pool, tiers, orders or order_maker(tiers.eviction))
        super().__init__(books, mover, gate, min(tiers.kept_blocks, tiers.host_blocks))
        self.base = self._pool = pool
        self.readmit, self.rejoin = pool.readmit, pool.rejoin
        self.ids = pool.ids
        """All own block ids are below this."""
        self.block_tokens = pool.block_tokens
        self.on_moved_block, self.on_borrowed_free = books.on_moved_block, books.on_borrowed_free
        self._ahead = SaveAhead(books, mover)
        self.shadows = books.shadows
        self._waits: dict[Awaited, None] = {}
        self._loads: list[list[tuple[Node, Load]]] = []
        """Loads under way. A load owns the blocks that it fills until it ends."""

    @property
    def trouble(self) -> str:
        """Return the last error of an eviction order from outside; empty: there is none."""
        failed = [order for order in self._books.orders if order.fault]
        times = sum(order.faults for order in failed)
        return f"{failed[0].fault}; {times} blocks are ordered by their last use instead" if failed else ""

    @property
    def total_blocks(self) -> int:
        return self._pool.total_blocks

    @property
    def free_blocks(self) -> int:
        """Number of empty blocks, without `evictable_blocks`."""
        return self._pool.free_blocks

    @property
    def evictable_blocks(self) -> int:
        """Named and used by nobody."""
        return self._books.evictable

    def withdraw(self, blocks: Iterable[int]) -> list[int]:
        """Withdraw allocated blocks without a name from the pool. Raises ValueError on others."""
        blocks = list(blocks)
        if any(self._books.node_of(block) is not None for block in blocks):
            raise ValueError("a block that has a name cannot be withdrawn")
        return self._pool.withdraw(blocks)

    def can_allocate(self, blocks: int) -> bool:
        return blocks <= self._pool.free_blocks + self.evictable_blocks

    def allocate(self, blocks: int) -> list[int]:
        """Take blocks, evicting others if necessary; return ids. Raises ValueError, and takes none, if it
        cannot."""
        if blocks < 0 or not self.can_allocate(blocks):
            raise ValueError(
                f"{blocks} asked for, {self.free_blocks} free, {self.evictable_blocks} evictable"
            )
        while self._pool.free_blocks < blocks:
            self._evict_from_device()
        return self._pool.allocate(blocks)

    def shed(self, blocks: int) -> None:
        """Evict up to so many unused blocks from the device."""
        for _ in range(min(blocks, self.evictable_blocks)):
            self._evict_from_device()

    def release(self, blocks: Iterable[int]) -> None:
        """Release blocks, the last first. Raises ValueError on one that is not held."""
        for block in reversed(list(blocks)):
            node = self._books.node_of(block)
            if node is None:
                self._pool.release([block])
            else:
                self._books.let_go(node)

    def acquire(
        self, names: Sequence[BlockHash], most_blocks: int, first_block: int = 0, *, may_load: bool = True
    ) -> Hit:
        """Hold the longest stored prefix of `names`, at most so many blocks in all. With `may_load`, blocks
        below the device are loaded if that is faster than computing, or awaited if a load is under way. With
        `first_block`, the caller has all blocks before that one."""
        self._books.requests += first_block == 0
        chain = self._books.tree.match(names)
        found = chain[first_block:most_blocks]
        if first_block and found and not _is_near(chain[first_block - 1]):
            found = []
        for node in reversed(found):
            self._books.touch(node)
        near = next((i for i, node in enumerate(found) if node.places[Tier.DEVICE] is None), len(found))
        for node in found[:near]:
            self._books.hold(node)
        self.gate.on_loaded(Tier.DEVICE, near, 0.0)
        far = found[near:]
        lost = next((i for i, node in enumerate(far) if node.places[Tier.DEVICE] is not None), len(far))
        awaited = self._send_for(far[:lost]) if may_load and lost else None
        done = near + (0 if awaited is None else len(awaited.nodes))
        self.counts["hits_device"] += near
        self.counts["hits_borrowed"] += sum(not self._books.is_own(node) for node in found[:near])
        self.counts["misses"] += max(0, min(len(names), most_blocks) - first_block - done)
        blocks = tuple(block_of(node) for node in found[:near])
        ahead = len(chain) - first_block - done if done and done == len(found) else 0
        return Hit(blocks, (near, 0, 0), awaited, ahead=ahead)

    def collect(self, awaited: Awaited) -> Hit:
        """End a wait: the waiting sequence holds the blocks that arrived, up to the first that did not.
        Unfinished loads go on."""
        del self._waits[awaited]
        came = next((at for at, node in enumerate(awaited.nodes) if not _is_near(node)), len(awaited.nodes))
        for node in reversed(awaited.nodes[came:]):
            self._books.let_go(node)
        tiers = Counter(awaited.tiers[:came])
        for tier in Tier:
            self.counts[f"hits_{tier.name.lower()}"] += tiers[tier]
        self.counts["misses"] += len(awaited.nodes) - came
        blocks = tuple(block_of(node) for node in awaited.nodes[:came])
        loaded = tiers[Tier.DEVICE], tiers[Tier.HOST], tiers[Tier.DISK]
        return Hit(blocks, loaded, from_peers=tiers[Tier.PEER])

    def _on_loaded(self, pairs: list[tuple[Node, Load]], loaded: Loaded) -> None:
        """Apply the end of a load: loaded blocks are on the device, and unfilled blocks are free."""
        self._loads.remove(pairs)
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
        """Number of device blocks that loads are filling: neither free, nor evictable, nor held yet."""
        return sum(map(len, self._loads))

    def save_ahead(self) -> int:
        """Start copying blocks to the host that are about to be evicted; return the number started."""
        place = self.gate.cheapest((HOST, DROPPED), self._books.history.returning)
        self._books.keeps_unused = place is HOST
        return self._ahead.work()

    def known_blocks(self, names: Sequence[BlockHash]) -> int:
        """Return the number of leading `names` on the device, without holding them."""
        found = self._books.tree.match(names)
        return next((at for at, node in enumerate(found) if not _is_near(node)), len(found))

    def hold(self, names: Sequence[BlockHash]) -> list[int]:
        """Hold consecutive blocks on the own device, up to the first that is missing; undo with `release`.
        `names` need not begin a sequence."""
        held: list[int] = []
        for name in names:
            node = self._books.tree.find(name)
            if node is None or not self._books.is_own(node):
                break
            self._books.hold(node)
            held.append(block_of(node))
        return held

    def publish(self, block: int, name: BlockHash, parent: BlockHash | None, tenant: str = "") -> bool:
        """Name a full, held block and charge `tenant` for it. False when it stays private: the name is on the
        device already, or its parent is not."""
        tree = self._books.tree
        before = None if parent is None else tree.find(parent)
        if self._books.node_of(block) is not None or (parent is not None and before is None):
            return False
        node = tree.find(name)
        if (before is not None and not _is_near(before)) or (node is not None and _is_near(node)):
            return False
        node = node or self._books.enter(name, before, tenant)
        if node.is_shadow:
            node.tenant = tenant
        self._books.hold(node)
        self._books.put(node, Tier.DEVICE, block)
        return True

    # Borrowed blocks have ids from `ids` on; their bytes are at a creditor.

    def has_name(self, block: int) -> bool:
        """Whether the block is shared under a name."""
        return self._books.node_of(block) is not None

    def borrowed(self, names: Sequence[BlockHash]) -> list[int]:
        """Return consecutive blocks held by creditors, up to the first that is not, without holding them."""
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
        node = self._books.node_of(block)
        return node is not None and not node.busy

    def forget_borrowed(self, blocks: int, spared: Collection[int] = ()) -> None:
        """Forget the names of so many unused borrowed blocks outside `spared`, and all blocks below them."""
        for node in self._books.idle_borrowed():
            if blocks < 1:
                return
            if not _is_near(node) or block_of(node) in spared:
                continue
            for lost in [*reversed(self._books.tree.below(node)), node]:
                if _is_near(lost):
                    blocks -= not self._books.is_own(lost) and block_of(lost) not in spared
                    self._take_off(lost)

    def lose_borrowed(self, blocks: Iterable[int]) -> None:
        """Drop blocks of a creditor that is gone. No sequence holds them, but loads may."""
        for block in blocks:
            node = self._books.node_of(block)
            if node is not None:
                self._books.clear_below(node)  # Users of those blocks have their own copy.
                self._books.remove(node, Tier.DEVICE)

    def rename(self, moves: Mapping[int, int]) -> None:
        """Rename borrowed blocks to taken own blocks that have their contents now."""
        for block, own in moves.items():
            node = self._books.node_of(block)
            if node is not None:
                self._books.rename(node, own)

    def verify(self, block: int, is_intact: Callable[[int, BlockHash], bool]) -> bool:
        """Whether the host copy of `block` is intact; if not, it is dropped."""
        node = self._books.node_of(block)
        place = None if node is None else node.places[Tier.HOST]
        if node is None or place is None or is_intact(place, node.name):
            return True
        self._lose(node, Tier.HOST)
        return False

    def condemn(self, block: int) -> None:
        """Forget a wrong block and everything computed from it, except blocks in use or being copied."""
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
        """Raise AssertionError unless blocks and slots are conserved; `held` has each block as often as
        sequences hold it."""
        loads = [pair for pairs in self._loads for pair in pairs]
        awaited = [node for wait in self._waits for node in wait.nodes]
        assert all(node.arriving for node, _ in loads), "a load is on the way to nothing"
        self._books.check_integrity(
            held,
            [*awaited, *(node for node, _ in loads)],
            [load.block for _, load in loads],
            [*self._ahead.slots, *self.reading.values(), *self.shadows.open_places],
            self.writes.open.values(),
            self.peers.open.values(),
        )

    def _send_for(self, nodes: Sequence[Node]) -> Awaited | None:
        """Hold and await as many leading blocks as are being loaded or worth a load."""
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
        """Start to load as many leading blocks as are worth it; return those."""
        nodes = nodes[: self.gate.worth_loading([node.nearest for node in nodes])]
        for node in nodes:
            self._books.hold(node)
        usable = min(len(nodes), self._pool.free_blocks + self.evictable_blocks)
        blocks = self.allocate(usable)
        loads = [_load_of(node, block) for node, block in zip(nodes, blocks, strict=False)]
        begun = list(nodes[:usable])
        pairs = list(zip(begun, loads, strict=True))
        ended = partial(self._on_loaded, pairs)
        if loads and self._mover.start_load(loads, self.gate.most_s(usable), ended):
            self._loads.append(pairs)
            for node in begun:
                node.arriving = True
        else:
            begun = []
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
        """Evict one own block, after a copy to the host if it has none and is worth one."""
        is_own = False
        while not is_own:  # Borrowed blocks may hang on the first own block.
            node = self._books.pop_device()
            assert node is not None, "nothing to evict although blocks were counted as evictable"
            is_own = self._books.is_own(node)
            self._take_off(node)

    def _take_off(self, node: Node) -> None:
        """Remove a block from the device, after its copy to the host."""
        self._ahead.finish(node)
        is_missing = node.places[Tier.HOST] is None and self._books.is_own(node)
        is_worth_it = self._books.is_worth_a_copy(node)
        self.counts["not_saved"] += is_missing and not is_worth_it and self._books.host.total > 0
        if is_missing and is_worth_it and not self._ahead.adopt(node):
            place = self._books.host_slot(node)
            if place is not None:
                took_s = self._mover.store([Store(node.name, block_of(node), place)])
                self.gate.spent_s[Tier.HOST] += took_s
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
