"""A prefix cache whose lower tiers are lists, and whose copies end when a test says so."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.worker.kv.core.block_manager import Tiers
from services.worker.kv.core.block_pool import BlockPool, block_table, first_borrowed
from services.worker.kv.core.borrowed_pool import ExtendedPool
from services.worker.kv.core.load_policy import CostGate
from services.worker.kv.core.prefix_cache import PrefixCache
from services.worker.kv.core.radix_tree import Node, Tier
from services.worker.kv.core.tier_copier import Awaited, Hit, Load, Loaded, Store, StoredBlock
from shared.blocks import BlockHash, chain, root

BLOCK_TOKENS = 2
ROOT = root(b"fingerprint")


def tokens_of(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


def names_of(tokens: bytes) -> list[BlockHash]:
    return chain(ROOT, tokens, BLOCK_TOKENS)


def flip_byte(path: Path, at: int, mask: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


Ended = Callable[[bool], None]


@dataclass
class MemoryMover:
    """Tiers whose "bytes" are the name of what was stored there. Faults are switched on by the test."""

    device: dict[int, BlockHash] = field(default_factory=dict)
    host: dict[int, BlockHash] = field(default_factory=dict)
    disk: dict[int, StoredBlock] = field(default_factory=dict)
    peers: dict[int, StoredBlock] = field(default_factory=dict)
    loads: list[tuple[list[Load], Callable[[Loaded], None]]] = field(default_factory=list)
    stores: dict[int, tuple[list[Store], Ended]] = field(default_factory=dict)
    writes: list[tuple[int, StoredBlock, Ended]] = field(default_factory=list)
    sends: list[tuple[int, StoredBlock, Ended]] = field(default_factory=list)
    reads: list[tuple[int, int, BlockHash, Ended]] = field(default_factory=list)
    lost_host: set[int] = field(default_factory=set)
    lost_disk: set[int] = field(default_factory=set)
    lost_peers: set[int] = field(default_factory=set)
    """Spoilt, or not lent any more."""
    abandon_after: int = 1000
    most_open: int = 3

    def start_load(self, loads: Sequence[Load], most_s: float, ended: Callable[[Loaded], None]) -> bool:
        if len(self.loads) >= self.most_open:
            return False
        self.loads.append((list(loads), ended))
        return True

    def load(self, loads: Sequence[Load]) -> Loaded:
        for done, load in enumerate(loads):
            if done >= self.abandon_after:
                return Loaded(done, wasted_s=0.06)
            lost = {Tier.HOST: self.lost_host, Tier.DISK: self.lost_disk, Tier.PEER: self.lost_peers}
            if load.place in lost[load.tier]:
                return Loaded(done, failed=True)
            below = self.peers if load.tier is Tier.PEER else self.disk
            held = self.host.get(load.place) if load.tier is Tier.HOST else below[load.place].name
            assert held == load.name, "the cache asked for a block where it is not, or gave it away meanwhile"
            self.device[load.block] = load.name
        return Loaded(len(loads), (0.0, 0.001, 0.002, 0.0015))

    def start_store(self, ticket: int, stores: Sequence[Store], ended: Ended) -> bool:
        if len(self.stores) >= self.most_open:
            return False
        self.stores[ticket] = list(stores), ended
        return True

    def finish_store(self, ticket: int) -> bool:
        self.store(self.stores.pop(ticket)[0])
        return True

    def store(self, stores: Sequence[Store]) -> float:
        for store in stores:
            assert self.device[store.block] == store.name, "a block was reused before it was saved"
            self.host[store.place] = store.name
            self.lost_host.discard(store.place)
        return 0.001 * len(stores)

    def seal(self, place: int, name: BlockHash) -> None:
        raise AssertionError("no block of this cache lies on the host while it is in use")

    def start_write(self, tier: Tier, source: int, node: StoredBlock, ended: Ended) -> bool:
        writes = self.writes if tier is Tier.DISK else self.sends
        if len(writes) >= self.most_open:
            return False
        assert self.host[source] == node.name
        writes.append((source, node, ended))
        return True

    def start_read(self, place: int, target: int, name: BlockHash, ended: Ended) -> bool:
        if len(self.reads) >= self.most_open:
            return False
        self.reads.append((place, target, name, ended))
        return True

    def publish(self, cache: PrefixCache, names: Sequence[BlockHash]) -> list[int]:
        """Blocks of a prompt that somebody has computed, and uses no more."""
        blocks = cache.allocate(len(names))
        for block, name, parent in zip(blocks, names, [None, *names], strict=False):
            self.device[block] = name
            assert cache.publish(block, name, parent)
        cache.release(blocks)
        return blocks


class Rig:
    """A cache, its movers, and sequences that hold blocks."""

    def __init__(
        self,
        device: int,
        host: int,
        disk: int,
        eviction: str,
        kept: int = 0,
        shadows: int = 0,
        peers: int = 0,
    ) -> None:
        self.mover = MemoryMover()
        self.pool = BlockPool(device, BLOCK_TOKENS)
        tiers = Tiers(host, disk, eviction, kept_blocks=kept, shadow_blocks=shadows, peer_blocks=peers)
        self.cache = PrefixCache(self.pool, tiers, self.mover, CostGate())
        self.blocks = ExtendedPool(self.cache, device)
        self.blocks.on_moved = self.move
        self._borrowed = device
        self._apart: list[int] = []
        self.held: list[list[int]] = []
        self.names: list[list[BlockHash]] = []
        """Of those in `held`."""
        self.waiting: list[tuple[list[BlockHash], list[int], Awaited]] = []
        self.kept: list[list[Node]] = []
        self.shadowing: list[tuple[list[BlockHash], BlockHash | None, list[int]]] = []
        """Names, what precedes them, and the slots that they are being written to."""
        self.now_s = 0.0
        self._lent = 0
        """Slots that peers ever lent to the cache."""

    def lend(self, blocks: int) -> None:
        """A peer lends so many slots, as far as they are wanted."""
        wanted = self.cache.peers.wanted_blocks()
        places = range(self._lent, self._lent + min(blocks, wanted))
        self._lent += len(places)
        self.cache.peers.admit(places)
        self.cache.peers.searched(found=bool(places))

    def lose_peers(self, first: int, blocks: int) -> None:
        """The creditor of these is gone; some may have been lost before, or never lent."""
        gone = range(first, first + blocks)
        self.mover.lost_peers.update(gone)
        self.cache.peers.lose(gone)

    def end_sends(self, *, ok: bool) -> None:
        sends, self.mover.sends = self.mover.sends, []
        for source, node, ended in sends:
            intact = ok and node.place not in self.mover.lost_peers and self.mover.host[source] == node.name
            if intact:
                self.mover.peers[node.place] = node
            ended(intact)

    def shadow(self, tokens: bytes) -> None:
        """Another worker's sequence has come so far: what is missing of it here is on its way."""
        names, keeping = names_of(tokens), self.cache.shadows
        self.now_s += 1.0
        known = keeping.known(names, self.now_s)
        places = keeping.room(len(names) - known, self.now_s, names[:known])
        self.shadowing.append((names[known:], names[known - 1] if known else None, places))

    def end_shadows(self, blocks: int) -> None:
        """So many of the last that are on their way arrive, at most; the link breaks then."""
        if not self.shadowing:
            return
        names, before, places = self.shadowing.pop()
        came = names[: min(blocks, len(places))]
        for place, name in zip(places, came, strict=False):
            self.mover.host[place] = name
            self.mover.lost_host.discard(place)
        self.cache.shadows.fill(places, came, before, self.now_s)

    def acquire(self, names: list[BlockHash], most_blocks: int) -> Hit:
        hit = self.cache.acquire(names, most_blocks)
        if hit.awaited is None:
            return hit
        self.end_loads()
        assert hit.awaited.is_over
        came = self.cache.collect(hit.awaited)
        device, host, disk = (before + after for before, after in zip(hit.loaded, came.loaded, strict=True))
        return Hit(hit.blocks + came.blocks, (device, host, disk), None, hit.ahead)

    def run(self, tokens: bytes) -> None:
        """A sequence: hit, compute the rest, publish; it ends at once if there is no room."""
        names = names_of(tokens)
        self._go_on(names, list(self.acquire(names, len(names)).blocks))

    def begin(self, tokens: bytes) -> None:
        """The same, but it waits for what is loaded until it goes on."""
        names = names_of(tokens)
        hit = self.cache.acquire(names, len(names))
        if hit.awaited is None:
            self._go_on(names, list(hit.blocks))
        else:
            self.waiting.append((names, list(hit.blocks), hit.awaited))

    def go_on(self, at: int) -> None:
        """One of those that wait does so no longer, whether its blocks are there or not."""
        if self.waiting:
            names, blocks, awaited = self.waiting.pop(at % len(self.waiting))
            self._go_on(names, [*blocks, *self.cache.collect(awaited).blocks])

    def _go_on(self, names: list[BlockHash], blocks: list[int]) -> None:
        for block, name in zip(blocks, names, strict=False):
            assert self.mover.device[block] == name, "a hit holds other bytes"
        found = len(blocks)
        missing = len(names) - len(blocks)
        if self.blocks.can_allocate(missing):
            blocks += self.blocks.allocate(missing)
            for index in range(found, len(names)):
                self.mover.device[blocks[index]] = names[index]
                self.cache.publish(blocks[index], names[index], names[index - 1] if index else None)
        self.held.append(blocks)
        self.names.append(names[: len(blocks)])

    def serve(self, *prompts: bytes) -> None:
        """Sequences one after the other, from beginning to end."""
        for prompt in prompts:
            self.run(prompt)
            self.blocks.release(self.held.pop())
            self.names.pop()

    def end(self, at: int, *, is_kept: bool = False) -> None:
        """One of those that run gives its blocks back; kept on the host, if it will return."""
        if not self.held:
            return
        names, blocks = self.names.pop(at % len(self.held)), self.held.pop(at % len(self.held))
        if is_kept:
            own = first_borrowed(block_table(blocks), self.blocks.own_blocks)
            self.kept.append(self.cache.keep(names[:own]))
        self.blocks.release(blocks)

    def unkeep(self, at: int) -> None:
        if self.kept:
            self.cache.unkeep(self.kept.pop(at % len(self.kept)))

    def borrow(self, blocks: int) -> None:
        self.blocks.admit(range(self._borrowed, self._borrowed + blocks))
        self._borrowed += blocks

    @property
    def _all_borrowed(self) -> range:
        return range(self.blocks.own_blocks, self._borrowed)

    def lose(self, count: int) -> None:
        """A creditor of so many blocks is gone; who has one of them ends."""
        there = [
            block for block in range(self.blocks.own_blocks, self._borrowed) if block in self.mover.device
        ]
        gone = set(there[-count:])
        for at in reversed(range(len(self.held))):
            if gone.intersection(self.held[at]):
                self.end(at)
        for at in reversed(range(len(self.waiting))):
            _, blocks, awaited = self.waiting[at]
            if gone.intersection(blocks):
                del self.waiting[at]
                self.blocks.release([*blocks, *self.cache.collect(awaited).blocks])
        self.blocks.lose(gone)
        for block in gone:
            del self.mover.device[block]

    def bring_home(self, most_blocks: int) -> None:
        """Borrowed blocks that somebody has, or the cache: as far as own ones are free."""
        own = self.blocks.own
        room = min(most_blocks, own.free_blocks + own.evictable_blocks)
        chosen = self.blocks.set_apart(
            self.blocks.are_used(range(self.blocks.own_blocks, self._borrowed)), room
        )
        home = own.withdraw(own.allocate(len(chosen)))
        for there, here in zip(chosen, home, strict=True):
            if there in self.mover.device:
                self.mover.device[here] = self.mover.device[there]
        own.readmit(self.blocks.come_home(zip(chosen, home, strict=True)))

    def set_apart(self, most_blocks: int) -> None:
        """Nobody gets these until `rejoin`."""
        self._apart += self.blocks.set_apart(self._all_borrowed, most_blocks)

    def rejoin(self) -> None:
        self.blocks.rejoin(self._apart)
        self._apart = []

    def move(self, moves: Mapping[int, int]) -> None:
        for blocks in (*self.held, *(blocks for _, blocks, _ in self.waiting)):
            blocks[:] = [moves.get(block, block) for block in blocks]

    def settle(self, *, ok: bool) -> None:
        self.end_loads()
        self.end_stores(ok=ok)
        self.end_disk_copies(ok=ok)
        self.end_sends(ok=ok)

    def end_disk_copies(self, *, ok: bool) -> None:
        reads, self.mover.reads = self.mover.reads, []
        writes, self.mover.writes = self.mover.writes, []
        for place, target, name, ended in reads:
            intact = ok and place not in self.mover.lost_disk and self.mover.disk[place].name == name
            if intact:
                self.mover.host[target] = name
                self.mover.lost_host.discard(target)
            ended(intact)
        for source, node, ended in writes:
            intact = ok and self.mover.host[source] == node.name  # not if it was lost meanwhile, and reused
            if intact:
                self.mover.disk[node.place] = node
                self.mover.lost_disk.discard(node.place)
            ended(intact)

    def end_loads(self) -> None:
        loads, self.mover.loads = self.mover.loads, []
        for one, ended in loads:
            ended(self.mover.load(one))

    def end_stores(self, *, ok: bool = True) -> None:
        stores, self.mover.stores = self.mover.stores, {}
        for copy, ended in stores.values():
            if ok:
                self.mover.store(copy)
            ended(ok)

    def check(self) -> None:
        """Copies to and from the device may be under way."""
        self.end_disk_copies(ok=True)
        waiting = [block for _, blocks, _ in self.waiting for block in blocks]
        self.blocks.check_integrity([block for blocks in self.held for block in blocks] + waiting)
