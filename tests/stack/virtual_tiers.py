"""Host, peers and disk of a worker on virtual time: copies take a while, some fail, none loses a block."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from services.worker.kv.core.prefix_cache import PrefixCache
from services.worker.kv.core.radix_tree import Tier
from services.worker.kv.core.tier_copier import Load, Loaded, Store, StoredBlock
from shared.blocks import BlockHash

After = Callable[[float, Callable[[], None]], None]
"""Does something later, between two steps, if the worker still lives then."""


class VirtualTiers:
    """A `BlockMover` without bytes: of a slot it knows whose bytes are in it, of a block that nobody else has
    it while something is copied there."""

    def __init__(self, after: After, random: Random, copies_s: Sequence[float], faults: float) -> None:
        """A copy takes one of `copies_s`; of loads a share of `faults` ends early, of writes and reads of the
        disk it fails."""
        self._after, self._random = after, random
        self._copies_s, self._faults = copies_s, faults
        self._slots: dict[int, BlockHash] = {}
        self._open: dict[int, Sequence[Store]] = {}
        self.loaded_blocks = self.lost_loads = self.stored_blocks = self.late_stores = 0
        self.cache: PrefixCache | None = None
        """Set once it is there."""
        self.read: Callable[[int], Any] = lambda block: None
        self.write: Callable[[int, Any], None] = lambda block, content: None
        """What is in a block of the device, where somebody keeps account of that."""
        self.content: dict[int, Any] = {}
        """By slot."""
        self.file: dict[int, tuple[StoredBlock, Any]] = {}
        """By the disk's slot; it outlives the worker."""
        self.sent: dict[int, tuple[StoredBlock, Any]] = {}
        """By slots that others lend."""
        self._lent = 0
        """Such slots, ever."""
        self.adopted_blocks = self.written_blocks = self.full_disks = self.read_blocks = 0

    def start_load(self, loads: Sequence[Load], most_s: float, ended: Callable[[Loaded], None]) -> bool:
        done, failed = len(loads), False
        if self._random.random() < self._faults:
            done, failed = self._random.randrange(len(loads)), self._random.random() < 0.5
            self.lost_loads += 1

        def end() -> None:
            whole, broken = done, failed
            for at, load in enumerate(loads):
                is_there = self._at(load.tier, load.place)[0] == load.name
                may_be_gone = load.tier in (Tier.DISK, Tier.PEER)
                assert is_there or may_be_gone, "a slot was reused while it was read"
                if not is_there and at < whole:  # as a record says that is not what was asked for
                    whole, broken = at, True
                    break
            for load in loads[:whole]:
                self.write(load.block, self._at(load.tier, load.place)[1])
            self.loaded_blocks += whole
            ended(Loaded(whole, failed=broken))

        self._after(self._random.choice(self._copies_s), end)
        return True

    def start_store(self, ticket: int, stores: Sequence[Store], ended: Callable[[bool], None]) -> bool:
        self._open[ticket] = stores
        is_fine = self._random.random() >= self._faults

        def end() -> None:
            if ticket in self._open:
                del self._open[ticket]
                if is_fine:
                    self._fill(stores)
                ended(is_fine)

        self._after(self._random.choice(self._copies_s), end)
        return True

    def finish_store(self, ticket: int) -> bool:
        self._fill(self._open.pop(ticket))
        return True

    def store(self, stores: Sequence[Store]) -> float:
        self.late_stores += len(stores)
        self._slots.update({store.place: store.name for store in stores})
        self.content.update({store.place: self.read(store.block) for store in stores})
        return 0.0

    def receive(self, source: "VirtualTiers", block: int, place: int, name: BlockHash) -> None:
        """From another worker's device, to a slot that was given for it."""
        self._slots[place], self.content[place] = name, source.read(block)

    def seal(self, place: int, name: BlockHash) -> None:
        self._slots[place] = name
        self.adopted_blocks += 1

    def start_write(self, tier: Tier, source: int, node: StoredBlock, ended: Callable[[bool], None]) -> bool:
        content, is_fine = self.content[source], self._random.random() >= self._faults
        assert self._slots[source] == node.name

        def end() -> None:
            if is_fine:
                (self.file if tier is Tier.DISK else self.sent)[node.place] = node, content
            if tier is Tier.DISK:
                self.written_blocks += is_fine
                self.full_disks += not is_fine
            ended(is_fine)

        self._after(self._random.choice(self._copies_s), end)
        return True

    def visit_peers(self) -> None:
        """What others lend to the cache has become more, or less: all that is wanted, some of it, or they die
        with some of what they lent."""
        assert self.cache is not None
        peers, dice = self.cache.peers, self._random.random()
        wanted = peers.wanted_blocks()
        if dice < 0.1:
            lost = range(self._random.randrange(self._lent + 1), self._lent)
            for place in lost:
                self.sent.pop(place, None)
            peers.lose(lost)
        elif dice < 0.2:
            peers.retire()
        elif wanted:
            places = range(self._lent, self._lent + self._random.randint(0, wanted))
            self._lent += len(places)
            peers.admit(places)
            peers.searched(found=bool(places))

    def start_read(self, place: int, target: int, name: BlockHash, ended: Callable[[bool], None]) -> bool:
        is_fine = self._random.random() >= self._faults

        def end() -> None:
            found, content = self._at(Tier.DISK, place)
            is_whole = is_fine and found == name
            if is_whole:
                self._slots[target], self.content[target] = name, content
            self.read_blocks += is_whole
            ended(is_whole)

        self._after(self._random.choice(self._copies_s), end)
        return True

    def _at(self, tier: Tier, place: int) -> tuple[BlockHash | None, Any]:
        if tier is Tier.HOST:
            return self._slots[place], self.content[place]
        if tier is Tier.PEER and place not in self.sent:
            return None, None
        node, content = (self.sent if tier is Tier.PEER else self.file)[place]
        return node.name, content

    def _fill(self, stores: Sequence[Store]) -> None:
        assert self.cache is not None
        for store in stores:
            node = self.cache._books.tree.find(store.name)
            is_there = node is not None and node.places[Tier.DEVICE] == store.block
            assert is_there, "a block was reused while it was copied"
            self._slots[store.place], self.content[store.place] = store.name, self.read(store.block)
            self.stored_blocks += 1
