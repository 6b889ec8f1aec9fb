"""The host tier of a worker on virtual time: copies take a while, some fail, and none loses a block."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from services.worker.kv.core.prefix_cache import PrefixCache
from services.worker.kv.core.tier_copier import Load, Loaded, Store, StoredBlock
from shared.blocks import BlockHash

After = Callable[[float, Callable[[], None]], None]
"""Does something later, between two steps, if the worker still lives then."""


class VirtualTiers:
    """A `BlockMover` without bytes: of a slot it knows whose bytes are in it, of a block that nobody else has
    it while something is copied there."""

    def __init__(self, after: After, random: Random, copies_s: Sequence[float], faults: float) -> None:
        """A copy takes one of `copies_s`; of loads a share of `faults` ends early."""
        self._after = after
        self._random = random
        self._copies_s = copies_s
        self._faults = faults
        self._slots: dict[int, BlockHash] = {}
        self._open: dict[int, Store] = {}
        self.loaded_blocks = self.lost_loads = self.stored_blocks = self.late_stores = 0
        self.cache: PrefixCache | None = None
        """Set once it is there."""
        self.read: Callable[[int], Any] = lambda block: None
        self.write: Callable[[int, Any], None] = lambda block, content: None
        """What is in a block of the device, where somebody keeps account of that."""
        self._content: dict[int, Any] = {}
        """By slot."""

    def start_load(self, ticket: int, loads: Sequence[Load], most_s: float) -> bool:
        done, failed = len(loads), False
        if self._random.random() < self._faults:
            done, failed = self._random.randrange(len(loads)), self._random.random() < 0.5
            self.lost_loads += 1

        def end() -> None:
            assert self.cache is not None
            for load in loads:
                assert self._slots[load.place] == load.name, "a slot was reused while it was read"
            for load in loads[:done]:
                self.write(load.block, self._content[load.place])
            self.loaded_blocks += done
            self.cache.on_loaded(ticket, Loaded(done, failed=failed))

        self._after(self._random.choice(self._copies_s), end)
        return True

    def start_store(self, ticket: int, store: Store) -> bool:
        self._open[ticket] = store
        is_fine = self._random.random() >= self._faults

        def end() -> None:
            assert self.cache is not None
            if ticket in self._open:
                del self._open[ticket]
                if is_fine:
                    self._fill(store)
                self.cache.on_stored(ticket, ok=is_fine)

        self._after(self._random.choice(self._copies_s), end)
        return True

    def finish_store(self, ticket: int) -> bool:
        self._fill(self._open.pop(ticket))
        return True

    def store(self, stores: Sequence[Store]) -> float:
        self.late_stores += len(stores)
        self._slots.update({store.place: store.name for store in stores})
        self._content.update({store.place: self.read(store.block) for store in stores})
        return 0.0

    def start_write(self, source: int, node: StoredBlock) -> bool:
        return False

    def start_read(self, place: int, target: int, name: BlockHash) -> bool:
        return False

    def _fill(self, store: Store) -> None:
        assert self.cache is not None
        assert self.cache.hold([store.name]) == [store.block], "a block was reused while it was copied"
        self.cache.release([store.block])
        self._slots[store.place], self._content[store.place] = store.name, self.read(store.block)
        self.stored_blocks += 1
