"""The residency of blocks in use: on the device, or outside it in the worker's host memory. Pure.

A block keeps its id while its place changes. There are more ids than device blocks; a block outside has a row
of host memory, which the host tier of the prefix cache shares. A step writes only to blocks on the device and
reads blocks outside through buffers, layer by layer, behind the computation (`native/stream.h`):

    device 0 1 2 3, of which 3 is for buffers; ids 0 … 5
    0 1 2 are there, 4 is outside (in row 7); a step reads 0 1 4 and writes 2
    plan → fetch row 7 through a buffer; 0 and 2 where they are

A row that the cache holds for the same block is *shared*: the block may leave the device without a copy, and
the cache keeps the row when the block is freed. The least recently read block leaves first. Blocks that a
step fetches stay on the device if there is room. Source: papers/004; algorithms.md §6."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from services.worker.kv.core.block_pool import BlockPool, RowShare
from services.worker.kv.core.fetch_buffers import Blocks, FetchBuffers

_NOWHERE = -1
_NONE: Blocks = np.zeros(0, dtype=np.int32)
_READY_BLOCKS = 8
"""Number of evictable blocks to keep copied to the host in advance."""
_COLD_STEPS = 16
"""Number of steps without a read after which a block makes room for fetched ones."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The block moves of one step. Paired arrays have one length."""

    saved_from: Blocks
    """Device blocks copied out before the step, to the rows `saved_to`."""
    saved_to: Blocks
    loaded_from: Blocks
    """Rows copied in before the step, which writes to their blocks, to the device blocks `loaded_to`."""
    loaded_to: Blocks
    fetched: Blocks
    """Ids fetched from the rows `fetched_from` by layer, those still in their buffers first."""
    fetched_from: Blocks
    kept: int
    """Number of fetched ids still in their buffers."""
    place: Blocks
    """Device block where each fetched one stays; -1: it does not stay."""
    buffer: Blocks
    """Number of the pair of buffers of each fetched block."""
    saves: Blocks
    """Ids copied out while the step runs, from the device blocks `save_from` to the rows `save_to`."""
    save_from: Blocks
    save_to: Blocks


class Residency:
    """The places of `ids` blocks of `layers` layers, at most `device_blocks` of them on the device. All calls
    except `slot_of`, `is_outside` and `on_written` come from the engine's thread. `lock` is held while places
    change."""

    def __init__(
        self,
        device_blocks: int,
        ids: int,
        layers: int,
        move: Callable[["StepPlan"], None],
        lock: AbstractContextManager[object],
        rows: RowShare | None = None,
    ) -> None:
        """`move` makes a plan's immediate copies while `lock` is held. `rows`: host memory for blocks in use;
        None: one row per id."""
        self._move = move
        self._rows = rows or RowShare(BlockPool(ids, 1), ids)
        self.device_blocks = device_blocks
        self.ids = ids
        self.lock = lock
        self.codes: Blocks = np.full(ids, _NOWHERE, dtype=np.int32)
        """Place of each id in the present step: a device block, or `device_blocks` + index of the fetch."""
        self._slot: Blocks = np.full(ids, _NOWHERE, dtype=np.int32)
        self._id: Blocks = np.full(device_blocks, _NOWHERE, dtype=np.int32)
        """Id in each device block."""
        self._is_taken = np.zeros(ids, dtype=bool)
        self._row: Blocks = np.full(ids, _NOWHERE, dtype=np.int32)
        """Host row of each id; every block outside has one."""
        self._is_saved = np.zeros(ids, dtype=bool)
        """Whether the row has the block's contents."""
        self._is_shared = np.zeros(ids, dtype=bool)
        """Whether the row belongs to the cache."""
        self._is_pinned = np.zeros(ids, dtype=bool)
        self._read: npt.NDArray[np.int64] = np.zeros(ids, dtype=np.int64)
        """Number of the step that last read the block."""
        self._free = dict.fromkeys(range(device_blocks - 1, -1, -1))
        self.buffers = FetchBuffers(ids, layers, device_blocks)
        self._displaced = 0
        """Number of taken ids that are not in the device block of the same number."""
        self._step = 0
        self._plan: StepPlan | None = None
        self._filled: set[int] = set()
        """Blocks filled since the step began, but not by it."""
        self._wanted_ready = _READY_BLOCKS
        """Number of device blocks that should be free or have a copy on the host."""
        self.saved_late = 0
        """Number of blocks whose copy to the host delayed a step."""
        self.is_intact: Callable[[int], bool] = lambda block: True
        """Check the shared row of a block that is about to leave the device; unshares a damaged one."""
        self.on_moved: Callable[[int], None] = lambda block: None
        """Called with each block with a shared row that leaves or enters the device."""

    @property
    def is_plain(self) -> bool:
        """Whether every id in use is the device block of that number, and there are no buffers."""
        return not self._displaced and not self.buffers.spare

    @property
    def rows(self) -> BlockPool:
        """The rows of host memory, which may have other owners too."""
        return self._rows.rows

    @property
    def cache_rows(self) -> int:
        """Number of rows for other owners."""
        return self.rows.total_blocks - self._rows.total

    @property
    def spare_blocks(self) -> int:
        """Number of device blocks used for buffers."""
        return len(self.buffers.spare)

    @property
    def pinned_blocks(self) -> int:
        return int(np.count_nonzero(self._is_pinned))

    @property
    def room_blocks(self) -> int | None:
        """Number of blocks that a step may write to; None: no limit."""
        if self.is_plain:
            return None
        return self.device_blocks - self.spare_blocks - self.pinned_blocks

    def slot_of(self, block: int) -> int | None:
        """Return the device block of an id, None when it is outside. Hold `lock`."""
        slot = int(self._slot[block])
        return None if slot < 0 else slot

    def row_of(self, block: int) -> int:
        """Return the host row of a block outside. Hold `lock`."""
        return int(self._row[block])

    def is_outside(self, block: int) -> bool:
        """Whether the block is taken and not on the device."""
        return bool(self._is_taken[block] and self._slot[block] < 0)

    def saved_row(self, block: int) -> int | None:
        """Return the row with the block's contents, unless it is shared."""
        return int(self._row[block]) if self._is_saved[block] and not self._is_shared[block] else None

    def share(self, block: int, row: int) -> None:
        """Share a cache row that has the block's contents; it may be the block's own row so far."""
        with self.lock:
            if self._row[block] != row:
                self._drop_row(block)
                self.buffers.forget(block)  # It was filled from the old row.
            elif not self._is_shared[block]:
                self._rows.used -= 1
            self._row[block], self._is_saved[block], self._is_shared[block] = row, True, True

    def unshare(self, block: int) -> bool:
        """End the sharing of a row. True: the block lies there and keeps the row."""
        with self.lock:
            self._is_shared[block] = False
            if self.is_outside(block):
                self._rows.used += 1
                return True
            self._row[block], self._is_saved[block] = _NOWHERE, False
            return False

    def on_written(self, block: int) -> None:
        """Note that a block was filled outside a step, on the device or in its row. Hold `lock`."""
        self._is_saved[block] = self._slot[block] < 0
        self._filled.add(block)

    def take(self, blocks: Sequence[int]) -> None:
        """Take empty blocks, on the device as far as there is room."""
        with self.lock:
            for block in blocks:
                self._is_taken[block], self._is_saved[block] = True, False
                self._read[block] = self._step
                self._displaced += 1
                if block in self._free:
                    self._settle(block, block)
                elif self._free:
                    self._settle(block, next(reversed(self._free)))
                else:
                    self._give_row(block)

    def take_new(self, blocks: Sequence[int]) -> list[int]:
        """Take those of these blocks that are free; return them."""
        new = [block for block in blocks if not self._is_taken[block]]
        self.take(new)
        return new

    def give(self, blocks: Iterable[int]) -> None:
        """Free blocks and drop their contents."""
        with self.lock:
            for block in blocks:
                self._is_taken[block] = False
                self._leave(block)
                self._displaced -= 1
                self._drop_row(block)
                self._is_saved[block] = self._is_pinned[block] = False
                if self.buffers.spare:
                    self.buffers.forget(block)

    def pin(self, blocks: Sequence[int]) -> list[int]:
        """Fix blocks on the device and return their places. Raises ValueError without room for them."""
        with self.lock:
            wanted = np.array(blocks, dtype=np.int32)
            self._move(self._bring(wanted, wanted))
            self._is_pinned[wanted] = True
            self._is_saved[wanted] = False
            for block in blocks:
                self._drop_row(block)
            places: list[int] = self._slot[wanted].tolist()
            return places

    def unpin(self, slots: Iterable[int]) -> list[int]:
        """Let blocks at these places move again; return their ids."""
        blocks = [int(self._id[slot]) for slot in slots]
        with self.lock:
            self._is_pinned[blocks] = False
        return blocks

    def reserve(self, blocks: int, *, at_once: bool = False) -> bool:
        """Turn device blocks into buffers: free ones, and ones with a copy on the host. Whether there are
        enough now; missing ones are copied out with the next steps, or `at_once`."""
        with self.lock:
            missing = blocks - self.spare_blocks
            if at_once:
                self._move(self._clear(min(missing - len(self._free), len(self._movable(_NONE))), _NONE))
            self._wanted_ready = max(_READY_BLOCKS, missing)
            while missing > 0 and (self._free or self._clear_one()):
                slot, _ = self._free.popitem()
                self.buffers.add(slot)
                missing -= 1
            self.buffers.renumber()
            if missing <= 0:
                self._wanted_ready = _READY_BLOCKS
            return missing <= 0

    def release(self, blocks: int) -> None:
        """Keep only so many device blocks as buffers. No copy may be under way."""
        with self.lock:
            while self.spare_blocks > blocks:
                self._free[self.buffers.remove()] = None
            self.buffers.renumber()
            self._wanted_ready = _READY_BLOCKS

    def plan(self, blocks: Blocks, written: Blocks) -> StepPlan:
        """Plan the moves of a step that reads `blocks`, repeated as in its tables, and writes `written`.
        Raises ValueError if the device lacks room for written blocks, or buffers for read ones."""
        with self.lock:
            self._step += 1
            self._filled.clear()
            self._read[blocks] = self._step
            written = np.unique(written)
            now = self._bring(written[self._slot[written] < 0], written)
            self._is_saved[written] = False
            outside = np.unique(blocks[self._slot[blocks] < 0])
            self._is_saved[outside] = True  # A block never written is read as its row is.
            places = self._places(len(outside), written)
            staying, passing = outside[: len(places)], outside[len(places) :]
            self.buffers.claim(passing)
            again = self.buffers.is_warm[passing]
            kept = passing[again]
            fetched = np.concatenate([kept, passing[~again], staying])
            place = np.full(len(fetched), _NOWHERE, dtype=np.int32)
            place[len(passing) :] = places
            saves = self._next_saves(written)
            self._plan = replace(
                now,
                fetched=fetched,
                fetched_from=self._row[fetched],
                kept=len(kept),
                place=place,
                buffer=self.buffers.pair[fetched],
                saves=saves,
                save_from=self._slot[saves],
                save_to=self._row[saves],
            )
            codes = np.arange(len(fetched), dtype=np.int32) + self.device_blocks
            self.codes[fetched] = np.where(place < 0, codes, place)
            self.buffers.is_warm[:] = False
            self._move(self._plan)
            return self._plan

    def end(self, saved: int, *, is_complete: bool) -> None:
        """End a step of which the first `saved` saves were copied; unless `is_complete`, no fetch counts."""
        plan, self._plan = self._plan, None
        if plan is None:
            return
        with self.lock:
            for block in plan.saves[:saved].tolist():
                self._is_saved[block] = block not in self._filled
            for block, slot in zip(plan.fetched.tolist(), plan.place.tolist(), strict=True):
                self.codes[block] = _NOWHERE
                if slot >= 0 and is_complete:
                    self._settle(block, slot)
                    self.buffers.forget(block)
                elif slot >= 0:
                    self._free[slot] = None
                else:
                    self.buffers.is_warm[block] = is_complete

    def check_integrity(self) -> None:
        """Raise AssertionError unless each device block is free, spare or taken, and each taken id has a
        place."""
        held = [slot for slot in range(self.device_blocks) if self._id[slot] >= 0]
        assert sorted([*held, *self._free, *self.buffers.spare]) == list(range(self.device_blocks))
        for slot in held:
            block = int(self._id[slot])
            assert self._slot[block] == slot and self._is_taken[block] and self.codes[block] == slot
        has_row = self._row >= 0
        assert not (~self._is_taken & (self._is_pinned | has_row)).any()
        assert not (~has_row & (self._is_saved | self._is_shared)).any()
        assert has_row[self._is_taken & (self._slot < 0)].all(), "a block is nowhere"
        rows = self._row[has_row].tolist()
        assert len(rows) == len(set(rows)), "two blocks in one row"
        assert not (self._is_pinned & (self._slot < 0)).any(), "a pinned block has left the device"
        displaced = np.count_nonzero(self._is_taken & (self._slot != np.arange(self.ids)))
        assert displaced == self._displaced
        self.buffers.check_integrity()

    def check_rows(self, shared: Iterable[int]) -> None:
        """Raise AssertionError unless each row is once in `shared`, a block's own, or free."""
        shared = list(shared)
        assert set(self._row[self._is_shared].tolist()) <= set(shared)
        own = self._row[(self._row >= 0) & ~self._is_shared].tolist()
        assert len(own) == self._rows.used
        self.rows.check_integrity([*shared, *own])

    def _bring(self, missing: Blocks, spared: Blocks) -> StepPlan:
        """Give each missing block a place on the device; none of `spared` leaves for it."""
        missing = missing[self._slot[missing] < 0]
        cleared = self._clear(len(missing) - len(self._free), spared)
        for block in missing.tolist():
            self._settle(block, next(reversed(self._free)))
        loaded = missing[self._is_saved[missing]]
        for block in loaded.tolist():
            self.buffers.forget(block)
        return replace(cleared, loaded_from=self._row[loaded], loaded_to=self._slot[loaded])

    def _clear(self, count: int, spared: Blocks) -> StepPlan:
        """Remove so many blocks from the device, none of `spared`; return the copies to make."""
        victims = self._victims(count, spared)
        for block in victims[self._is_shared[victims]].tolist():
            self._may_leave(block)
        late = victims[~self._is_saved[victims]]
        late_from = self._slot[late]
        self.saved_late += len(late)
        for block in late.tolist():
            self._give_row(block)
        self._is_saved[late] = True
        for block in victims.tolist():
            self._leave(block)
        return StepPlan(late_from, self._row[late], *(_NONE,) * 4, 0, *(_NONE,) * 5)

    def _victims(self, count: int, spared: Blocks) -> Blocks:
        """Return the blocks to remove first. Raises ValueError when there are fewer."""
        if count <= 0:
            return _NONE
        found = self._movable(spared)
        if len(found) < count:
            raise ValueError(f"the device needs {count} more blocks, and only {len(found)} may leave it")
        rank = 2 * self._read[found] + ~self._is_saved[found]
        return found[np.argpartition(rank, count - 1)[:count]]

    def _movable(self, spared: Blocks) -> Blocks:
        """Return blocks on the device that are neither pinned nor spared."""
        ids = self._id[self._id >= 0]
        is_kept = self._is_pinned.copy()
        is_kept[spared] = True
        found: Blocks = ids[~is_kept[ids]]
        return found

    def _places(self, wanted: int, spared: Blocks) -> list[int]:
        """Return device blocks for up to so many fetched ones: free ones, and cold ones with a host copy."""
        places = [self._free.popitem()[0] for _ in range(min(wanted, len(self._free)))]
        if len(places) < wanted and self._step > _COLD_STEPS:
            found = self._movable(spared)
            cold = found[self._is_saved[found] & (self._read[found] < self._step - _COLD_STEPS)]
            for block in cold[: wanted - len(places)].tolist():
                if self._may_leave(block):
                    self._leave(block)
                    places.append(self._free.popitem()[0])
        return places

    def _next_saves(self, written: Blocks) -> Blocks:
        """Return the blocks to copy out during the step, so that the next to leave need no copy."""
        found = self._movable(written)
        is_saved = self._is_saved[found]
        missing = self._wanted_ready - len(self._free) - int(np.count_nonzero(is_saved))
        unsaved = found[~is_saved]
        count = min(missing, len(unsaved), _READY_BLOCKS)
        if count <= 0:
            return _NONE
        chosen: Blocks = unsaved[np.argpartition(self._read[unsaved], count - 1)[:count]]
        for block in chosen.tolist():
            self._give_row(block)
        return chosen

    def _clear_one(self) -> bool:
        """Free one device block with a copy on the host, if there is one."""
        found = self._movable(_NONE)
        found = found[self._is_saved[found]]
        for block in found[np.argsort(self._read[found])].tolist():
            if self._may_leave(block):
                self._leave(block)
                return True
        return False

    def _may_leave(self, block: int) -> bool:
        """Whether a saved block's shared row is intact; a damaged row is no copy any more."""
        return not self._is_shared[block] or self.is_intact(block)

    def _settle(self, block: int, slot: int) -> None:
        self._free.pop(slot, None)
        self._slot[block] = self.codes[block] = slot
        self._id[slot] = block
        self._displaced -= slot == block
        if self._is_shared[block]:
            self.on_moved(block)

    def _leave(self, block: int) -> None:
        """Free the block's place on the device, if it has one."""
        slot = int(self._slot[block])
        if slot >= 0:
            self._displaced += slot == block
            self._slot[block] = self.codes[block] = _NOWHERE
            self._id[slot] = _NOWHERE
            self._free[slot] = None
            if self._is_shared[block]:
                self.on_moved(block)

    def _give_row(self, block: int) -> None:
        """Give the block a row if it has none."""
        if self._row[block] < 0:
            row = self._rows.take()
            if row is None:
                raise ValueError(f"{self._rows.total} rows of host memory are too few")
            self._row[block] = row

    def _drop_row(self, block: int) -> None:
        """Take the block's row away."""
        if self._row[block] >= 0 and not self._is_shared[block]:
            self._rows.give(int(self._row[block]))
        self._row[block], self._is_shared[block] = _NOWHERE, False
