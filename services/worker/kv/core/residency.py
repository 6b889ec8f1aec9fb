"""Which of a worker's blocks are on the device, and which in its own host memory while sequences use them.
Pure.

A block's id stays; where it is changes. Ids are more than the device has room for; what is outside has a row
of the host memory that the prefix cache's host tier lies in as well. A step writes to blocks on the device
alone, and reads all others wherever they are: what is outside goes through buffers on the device, layer by
layer, behind the computation (`native/stream.h`):

    device 0 1 2 3, of which 3 is for buffers; ids 0 … 5
    0 1 2 are there, 4 is outside (in row 7); a step reads 0 1 4 and writes 2
    plan → fetch row 7 through a buffer; 0 and 2 where they are

A row that the cache holds for the same block is *shared*: the block may leave the device without a copy, and
the row is the cache's when the block's id is given back.

Who leaves: what was read longest ago, of equals what the host has a copy of. Who comes back: what a step
fetches anyway, as far as the device has room. Source: papers/004, with some blocks of all layers in place of
all blocks of some layers; algorithms.md §6.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from services.worker.kv.core.block_pool import RowPool, RowShare
from services.worker.kv.core.fetch_buffers import Blocks, FetchBuffers

_NOWHERE = -1
_READY_BLOCKS = 8
"""So many could leave the device at once: copied ahead of need."""
_COLD_STEPS = 16
"""Not read for so many steps: it makes room for what is read in each."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What has to be moved for one step. Pairs of arrays have one length."""

    saved_from: Blocks
    """The device's blocks copied out before the step: …"""
    saved_to: Blocks
    """… rows."""
    loaded_from: Blocks
    """Rows copied in before the step, because it writes to what is in them: …"""
    loaded_to: Blocks
    fetched: Blocks
    """Ids brought in layer by layer, those the step before had in the same buffers first: …"""
    fetched_from: Blocks
    """… from these rows."""
    kept: int
    """How many those are."""
    place: Blocks
    """Of each fetched: the device's block where it stays, -1: it does not."""
    buffer: Blocks
    """Of each fetched: the number of its pair of buffers."""
    saves: Blocks
    """Ids copied out while the step runs: …"""
    save_from: Blocks
    save_to: Blocks
    """Rows."""


class Residency:
    """Of `ids` blocks, at most `device_blocks` on the device; `layers` of them make up a device's block.

    All calls but `slot_of`, `is_outside` and `on_written` are the engine thread's; `lock` is held while
    places change.
    """

    def __init__(
        self,
        device_blocks: int,
        ids: int,
        layers: int,
        move: Callable[["StepPlan"], None],
        lock: AbstractContextManager[object],
        rows: RowShare | None = None,
    ) -> None:
        """`move` does at once what a plan wants done now; `lock` is held meanwhile. `rows`: one for each
        block in use, at most; one for each id where nothing else is said."""
        self._move = move
        self._rows = rows or RowShare(RowPool(ids), ids)
        self.device_blocks = device_blocks
        self.ids = ids
        self.lock = lock
        self.codes: Blocks = np.full(ids, _NOWHERE, dtype=np.int32)
        """By id, for the present step: the device's block, or `device_blocks` and more: which of the
        fetched."""
        self._slot: Blocks = np.full(ids, _NOWHERE, dtype=np.int32)
        self._id: Blocks = np.full(device_blocks, _NOWHERE, dtype=np.int32)
        """By the device's block: who has it."""
        self._is_taken = np.zeros(ids, dtype=bool)
        self._row: Blocks = np.full(ids, _NOWHERE, dtype=np.int32)
        """Of host memory: each that is outside has one."""
        self._is_saved = np.zeros(ids, dtype=bool)
        """Its row has what it has."""
        self._is_shared = np.zeros(ids, dtype=bool)
        """Its row is the cache's."""
        self._is_pinned = np.zeros(ids, dtype=bool)
        self._read: npt.NDArray[np.int64] = np.zeros(ids, dtype=np.int64)
        """The step that read it last."""
        self._free = dict.fromkeys(range(device_blocks - 1, -1, -1))
        self.buffers = FetchBuffers(ids, layers, device_blocks)
        self._displaced = 0
        """Taken ids that are not in the device's block of the same number."""
        self._step = 0
        self._plan: StepPlan | None = None
        self._filled: set[int] = set()
        """By others than the present step, since it began."""
        self._wanted_ready = _READY_BLOCKS
        """So many should be free, or be on the host as well."""
        self.saved_late = 0
        """Blocks whose copy to the host a step waited for."""
        self.is_intact: Callable[[int], bool] = lambda block: True
        """Whether the shared row of a block that is about to leave the device is as it was; where it is not,
        it has been unshared on return."""
        self.on_moved: Callable[[int], None] = lambda block: None
        """Called with each block that leaves or enters the device and whose row is shared."""

    @property
    def is_plain(self) -> bool:
        """Every id in use is the device's block of that number, and nothing has to be kept track of."""
        return not self._displaced and not self.buffers.spare

    @property
    def rows(self) -> RowPool:
        """Of host memory, of which others may have some as well."""
        return self._rows.rows

    @property
    def cache_rows(self) -> int:
        """Of `rows`, those that others may have."""
        return self.rows.total - self._rows.total

    @property
    def spare_blocks(self) -> int:
        """Of the device, that buffers are made of."""
        return len(self.buffers.spare)

    @property
    def pinned_blocks(self) -> int:
        return int(np.count_nonzero(self._is_pinned))

    @property
    def room_blocks(self) -> int | None:
        """Blocks that one step may write to; None: as many as there are."""
        if self.is_plain:
            return None
        return self.device_blocks - self.spare_blocks - self.pinned_blocks

    def slot_of(self, block: int) -> int | None:
        """The device's block, None when it is not there. With `lock` held."""
        slot = int(self._slot[block])
        return None if slot < 0 else slot

    def row_of(self, block: int) -> int:
        """The row of a block that is not on the device. With `lock` held."""
        return int(self._row[block])

    def is_outside(self, block: int) -> bool:
        """Whether it is taken, and not on the device."""
        return bool(self._is_taken[block] and self._slot[block] < 0)

    def saved_row(self, block: int) -> int | None:
        """The row that has what the block has, unless it is shared."""
        return int(self._row[block]) if self._is_saved[block] and not self._is_shared[block] else None

    def share(self, block: int, row: int) -> None:
        """The cache has there what the block has, perhaps since now: in the row that the block had for
        itself."""
        with self.lock:
            if self._row[block] != row:
                self._drop_row(block)
                self.buffers.forget(block)  # What was read ahead from the row that others may have now.
            elif not self._is_shared[block]:
                self._rows.used -= 1
            self._row[block], self._is_saved[block], self._is_shared[block] = row, True, True

    def unshare(self, block: int) -> bool:
        """The cache wants that row no more. True: the block lies there and keeps it."""
        with self.lock:
            self._is_shared[block] = False
            if self.is_outside(block):
                self._rows.used += 1
                return True
            self._row[block], self._is_saved[block] = _NOWHERE, False
            return False

    def on_written(self, block: int) -> None:
        """It was filled by somebody else than a step, in its place on the device or else in its row. With
        `lock` held."""
        self._is_saved[block] = self._slot[block] < 0
        self._filled.add(block)

    def take(self, blocks: Sequence[int]) -> None:
        """These are in use from now on, with nothing in them: on the device as far as there is room."""
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
        """`take` for those of them that are not in use: which they are."""
        new = [block for block in blocks if not self._is_taken[block]]
        self.take(new)
        return new

    def give(self, blocks: Iterable[int]) -> None:
        """These are free again, and what is in them is forgotten."""
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
        """These stay where they are on the device from now on; where that is. Raises ValueError where there
        is no room for them."""
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
        """Who is there; they may be moved again."""
        blocks = [int(self._id[slot]) for slot in slots]
        with self.lock:
            self._is_pinned[blocks] = False
        return blocks

    def reserve(self, blocks: int, *, at_once: bool = False) -> bool:
        """Make buffers of so many of the device's blocks: of free ones, and of those whose copy the host has.
        Whether there are as many now; what is missing is copied out with the next steps, or `at_once`."""
        with self.lock:
            missing = blocks - self.spare_blocks
            if at_once:
                nothing = np.zeros(0, dtype=np.int32)
                self._move(self._clear(min(missing - len(self._free), len(self._movable(nothing))), nothing))
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
        """Keep only so many of the device's blocks as buffers. Nothing may be under way."""
        with self.lock:
            while self.spare_blocks > blocks:
                self._free[self.buffers.remove()] = None
            self.buffers.renumber()
            self._wanted_ready = _READY_BLOCKS

    def plan(self, blocks: Blocks, written: Blocks) -> StepPlan:
        """A step reads `blocks`, its own ids as often as they are in tables, and writes to some of them.

        Raises ValueError where the device has no room for what is written, or buffers for what is read.
        """
        with self.lock:
            self._step += 1
            self._filled.clear()
            self._read[blocks] = self._step
            written = np.unique(written)
            now = self._bring(written[self._slot[written] < 0], written)
            self._is_saved[written] = False
            outside = np.unique(blocks[self._slot[blocks] < 0])
            self._is_saved[outside] = True  # What was never written is read as its row of host memory is.
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
                buffer=self.buffers.pairs_of(fetched),
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
        """The step is over; `saved` of its `saves` were copied, and unless it `is_complete` nothing was
        fetched for certain."""
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
        """AssertionError unless every block of the device is free, spare, or one block's, and each that is in
        use is somewhere or has nothing in it."""
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
        """AssertionError unless `shared`, those that blocks have for themselves, and the free ones are each
        row once."""
        shared = list(shared)
        assert set(self._row[self._is_shared].tolist()) <= set(shared)
        own = self._row[(self._row >= 0) & ~self._is_shared].tolist()
        assert len(own) == self._rows.used
        self.rows.check_integrity([*shared, *own])

    def _bring(self, missing: Blocks, spared: Blocks) -> StepPlan:
        """Each of `missing` that is not on the device gets a place there; none of `spared` leaves for it."""
        missing = missing[self._slot[missing] < 0]
        cleared = self._clear(len(missing) - len(self._free), spared)
        for block in missing.tolist():
            self._settle(block, next(reversed(self._free)))
        loaded = missing[self._is_saved[missing]]
        for block in loaded.tolist():
            self.buffers.forget(block)
        return replace(cleared, loaded_from=self._row[loaded], loaded_to=self._slot[loaded])

    def _clear(self, count: int, spared: Blocks) -> StepPlan:
        """So many leave the device, none of `spared`: what has to be copied out for it."""
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
        none = np.zeros(0, dtype=np.int32)
        late_to = self._row[late]
        return StepPlan(late_from, late_to, none, none, none, none, 0, none, none, none, none, none)

    def _victims(self, count: int, spared: Blocks) -> Blocks:
        """Who leaves the device first. Raises ValueError when there are fewer."""
        if count <= 0:
            return np.zeros(0, dtype=np.int32)
        found = self._movable(spared)
        if len(found) < count:
            raise ValueError(f"{count} blocks more are to be on the device, and {len(found)} may leave it")
        rank = 2 * self._read[found] + ~self._is_saved[found]
        return found[np.argpartition(rank, count - 1)[:count]]

    def _movable(self, spared: Blocks) -> Blocks:
        """Those on the device that nobody keeps there."""
        ids = self._id[self._id >= 0]
        is_kept = self._is_pinned.copy()
        is_kept[spared] = True
        found: Blocks = ids[~is_kept[ids]]
        return found

    def _places(self, wanted: int, spared: Blocks) -> list[int]:
        """The device's blocks for up to so many that are fetched: free ones, and what nobody has read lately
        and the host has, too."""
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
        """What is copied out meanwhile, so that those who leave next can do so at once."""
        found = self._movable(written)
        is_saved = self._is_saved[found]
        missing = self._wanted_ready - len(self._free) - int(np.count_nonzero(is_saved))
        unsaved = found[~is_saved]
        count = min(missing, len(unsaved), _READY_BLOCKS)
        if count <= 0:
            return np.zeros(0, dtype=np.int32)
        chosen: Blocks = unsaved[np.argpartition(self._read[unsaved], count - 1)[:count]]
        for block in chosen.tolist():
            self._give_row(block)
        return chosen

    def _clear_one(self) -> bool:
        """Frees one of the device's blocks whose copy the host has, where there is one."""
        found = self._movable(np.zeros(0, dtype=np.int32))
        found = found[self._is_saved[found]]
        for block in found[np.argsort(self._read[found])].tolist():
            if self._may_leave(block):
                self._leave(block)
                return True
        return False

    def _may_leave(self, block: int) -> bool:
        """Of one that is saved: whether its row, if it is the cache's, is as it was. If not, it is saved no
        more."""
        return not self._is_shared[block] or self.is_intact(block)

    def _settle(self, block: int, slot: int) -> None:
        self._free.pop(slot, None)
        self._slot[block] = self.codes[block] = slot
        self._id[slot] = block
        self._displaced -= slot == block
        if self._is_shared[block]:
            self.on_moved(block)

    def _leave(self, block: int) -> None:
        """Its place on the device is free, if it has one."""
        slot = int(self._slot[block])
        if slot >= 0:
            self._displaced += slot == block
            self._slot[block] = self.codes[block] = _NOWHERE
            self._id[slot] = _NOWHERE
            self._free[slot] = None
            if self._is_shared[block]:
                self.on_moved(block)

    def _give_row(self, block: int) -> None:
        """It has one from now on."""
        if self._row[block] < 0:
            row = self._rows.take()
            if row is None:
                raise ValueError(f"{self._rows.total} rows of host memory are too few")
            self._row[block] = row

    def _drop_row(self, block: int) -> None:
        """It has none any more."""
        if self._row[block] >= 0 and not self._is_shared[block]:
            self._rows.give(int(self._row[block]))
        self._row[block], self._is_shared[block] = _NOWHERE, False
