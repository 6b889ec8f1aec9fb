"""Which of a worker's blocks are on the device, and which in its own host memory while sequences use them.
Pure.

A block's id stays; where it is changes. Ids are more than the device has room for, and each has a row of host
memory of its own. A step writes to blocks on the device alone, and reads all others wherever they are: what
is outside goes through buffers on the device, layer by layer, behind the computation (`native/stream.h`):

    device 0 1 2 3, of which 3 is for buffers; ids 0 … 5
    0 1 2 are there, 4 is outside (its copy in row 4); a step reads 0 1 4 and writes 2
    plan → fetch row 4 through a buffer; 0 and 2 where they are

Who leaves: what was read longest ago, of equals what the host has a copy of. Who comes back: what a step
fetches anyway, as far as the device has room. Source: papers/004, with some blocks of all layers in place of
all blocks of some layers; algorithms.md §6.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.int32]
_NOWHERE = -1
_READY_BLOCKS = 8
"""So many could leave the device at once: copied ahead of need."""
_COLD_STEPS = 16
"""Not read for so many steps: it makes room for what is read in each."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What has to be moved for one step. Pairs of arrays have one length."""

    saved_now: Blocks
    """Ids copied out before the step: …"""
    saved_from: Blocks
    """… the device's blocks that they leave."""
    loaded_now: Blocks
    """Ids copied in before the step, because it writes to them: …"""
    loaded_to: Blocks
    fetched: Blocks
    """Ids brought in layer by layer, those the step before had in the same buffers first."""
    kept: int
    """How many those are."""
    place: Blocks
    """Of each fetched: the device's block where it stays, -1: it does not."""
    buffer: Blocks
    """Of each fetched: the number of its buffers."""
    saves: Blocks
    """Ids copied out while the step runs: …"""
    save_from: Blocks


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
    ) -> None:
        """`move` does at once what a plan wants done now; `lock` is held meanwhile."""
        self._move = move
        self.device_blocks = device_blocks
        self.ids = ids
        self.lock = lock
        self.codes: Blocks = np.full(ids, _NOWHERE, dtype=np.int32)
        """By id, for the present step: the device's block, or `device_blocks` and more: which of the
        fetched."""
        self._layers = layers
        self._slot: Blocks = np.full(ids, _NOWHERE, dtype=np.int32)
        self._id: Blocks = np.full(device_blocks, _NOWHERE, dtype=np.int32)
        """By the device's block: who has it."""
        self._is_taken = np.zeros(ids, dtype=bool)
        self._is_saved = np.zeros(ids, dtype=bool)
        """Its row of host memory has what it has."""
        self._is_pinned = np.zeros(ids, dtype=bool)
        self._read: npt.NDArray[np.int64] = np.zeros(ids, dtype=np.int64)
        """The step that read it last."""
        self._free = dict.fromkeys(range(device_blocks - 1, -1, -1))
        self._spare: list[int] = []
        """The device's blocks that buffers are made of."""
        self._buffer: Blocks = np.full(ids, _NOWHERE, dtype=np.int32)
        self._was_fetched = np.zeros(ids, dtype=bool)
        """In the last step, and it is still outside."""
        self._free_buffers: list[int] = []
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

    @property
    def is_plain(self) -> bool:
        """Every id in use is the device's block of that number, and nothing has to be kept track of."""
        return not self._displaced and not self._spare

    @property
    def buffers(self) -> int:
        """So many blocks can be fetched in one step."""
        return len(self._spare) * self._layers // 2

    @property
    def spare_blocks(self) -> int:
        """Of the device, that buffers are made of."""
        return len(self._spare)

    @property
    def outside_blocks(self) -> int:
        """In use, with a copy on the host and none on the device."""
        return int(np.count_nonzero(self._is_taken & self._is_saved & (self._slot < 0)))

    @property
    def pinned_blocks(self) -> int:
        return int(np.count_nonzero(self._is_pinned))

    @property
    def room_blocks(self) -> int | None:
        """Blocks that one step may write to; None: as many as there are."""
        if self.is_plain:
            return None
        return self.device_blocks - len(self._spare) - self.pinned_blocks

    def arena(self, buffer: Blocks, parity: int) -> Blocks:
        """Where buffers are in memory that has the device's blocks layer by layer; two of each, by parity."""
        at = 2 * buffer.astype(np.int64) + parity
        spare = np.array(self._spare or [0], dtype=np.int64)[at // self._layers]
        found: Blocks = (at % self._layers * self.device_blocks + spare).astype(np.int32)
        return found

    def slot_of(self, block: int) -> int | None:
        """The device's block, None when it is not there. With `lock` held."""
        slot = int(self._slot[block])
        return None if slot < 0 else slot

    def is_outside(self, block: int) -> bool:
        """Whether its row of host memory is where it is. With `lock` held."""
        return bool(self._slot[block] < 0 and self._is_saved[block])

    def on_written(self, block: int) -> None:
        """It was filled by somebody else than a step, in its place on the device or else in its row of host
        memory. With `lock` held."""
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

    def take_new(self, blocks: Sequence[int]) -> list[int]:
        """`take` for those of them that are not in use: which they are."""
        new = [block for block in blocks if not self._is_taken[block]]
        self.take(new)
        return new

    def give(self, blocks: Iterable[int]) -> None:
        """These are free again, and what is in them is forgotten."""
        with self.lock:
            for block in blocks:
                self._leave(block)
                self._displaced -= 1
                self._is_taken[block] = self._is_saved[block] = self._is_pinned[block] = False
                self._forget_buffer(block)

    def pin(self, blocks: Sequence[int]) -> list[int]:
        """These stay where they are on the device from now on; where that is. Raises ValueError where there
        is no room for them."""
        with self.lock:
            wanted = np.array(blocks, dtype=np.int32)
            self._move(self._bring(wanted, wanted))
            self._is_pinned[wanted] = True
            places: list[int] = self._slot[wanted].tolist()
            return places

    def unpin(self, slots: Iterable[int]) -> list[int]:
        """Who is there; they may be moved again."""
        blocks = [int(self._id[slot]) for slot in slots]
        with self.lock:
            self._is_pinned[blocks] = False
            self._is_saved[blocks] = False
        return blocks

    def reserve(self, blocks: int, *, at_once: bool = False) -> bool:
        """Make buffers of so many of the device's blocks: of free ones, and of those whose copy the host has.
        Whether there are as many now; what is missing is copied out with the next steps, or `at_once`."""
        with self.lock:
            missing = blocks - len(self._spare)
            if at_once:
                nothing = np.zeros(0, dtype=np.int32)
                self._move(self._clear(min(missing - len(self._free), len(self._movable(nothing))), nothing))
            self._wanted_ready = max(_READY_BLOCKS, missing)
            while missing > 0 and (self._free or self._clear_one()):
                slot, _ = self._free.popitem()
                self._spare.append(slot)
                missing -= 1
            self._number_buffers()
            if missing <= 0:
                self._wanted_ready = _READY_BLOCKS
            return missing <= 0

    def release(self, blocks: int) -> None:
        """Keep only so many of the device's blocks as buffers. Nothing may be under way."""
        with self.lock:
            while len(self._spare) > blocks:
                self._free[self._spare.pop()] = None
            self._number_buffers()
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
            self._number(passing)
            again = self._was_fetched[passing]
            kept = passing[again]
            fetched = np.concatenate([kept, passing[~again], staying])
            place = np.full(len(fetched), _NOWHERE, dtype=np.int32)
            place[len(passing) :] = places
            saves = self._next_saves(written)
            self._plan = StepPlan(
                now.saved_now,
                now.saved_from,
                now.loaded_now,
                now.loaded_to,
                fetched,
                len(kept),
                place,
                self._buffer[fetched],
                saves,
                self._slot[saves],
            )
            codes = np.arange(len(fetched), dtype=np.int32) + self.device_blocks
            self.codes[fetched] = np.where(place < 0, codes, place)
            self._was_fetched[:] = False
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
                    self._forget_buffer(block)
                elif slot >= 0:
                    self._free[slot] = None
                else:
                    self._was_fetched[block] = is_complete

    def check_integrity(self) -> None:
        """AssertionError unless every block of the device is free, spare, or one block's, and each that is in
        use is somewhere or has nothing in it."""
        held = [slot for slot in range(self.device_blocks) if self._id[slot] >= 0]
        assert sorted([*held, *self._free, *self._spare]) == list(range(self.device_blocks))
        for slot in held:
            block = int(self._id[slot])
            assert self._slot[block] == slot and self._is_taken[block] and self.codes[block] == slot
        assert not self._is_taken[self._is_pinned | self._is_saved].size or bool(
            self._is_taken[self._is_pinned | self._is_saved].all()
        )
        assert not (self._is_pinned & (self._slot < 0)).any(), "a pinned block has left the device"
        displaced = np.count_nonzero(self._is_taken & (self._slot != np.arange(self.ids)))
        assert displaced == self._displaced
        numbers = self._buffer[self._buffer >= 0].tolist()
        assert sorted([*numbers, *self._free_buffers]) == list(range(self.buffers))

    def _bring(self, missing: Blocks, spared: Blocks) -> StepPlan:
        """Each of `missing` that is not on the device gets a place there; none of `spared` leaves for it."""
        missing = missing[self._slot[missing] < 0]
        cleared = self._clear(len(missing) - len(self._free), spared)
        for block in missing.tolist():
            self._settle(block, next(reversed(self._free)))
        loaded = missing[self._is_saved[missing]]
        for block in loaded.tolist():
            self._forget_buffer(block)
        return replace(cleared, loaded_now=loaded, loaded_to=self._slot[loaded])

    def _clear(self, count: int, spared: Blocks) -> StepPlan:
        """So many leave the device, none of `spared`: what has to be copied out for it."""
        victims = self._victims(count, spared)
        late = victims[~self._is_saved[victims]]
        late_from = self._slot[late]
        self._is_saved[late] = True
        self.saved_late += len(late)
        for block in victims.tolist():
            self._leave(block)
        none = np.zeros(0, dtype=np.int32)
        return StepPlan(late, late_from, none, none, none, 0, none, none, none, none)

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
        return unsaved[np.argpartition(self._read[unsaved], count - 1)[:count]]

    def _clear_one(self) -> bool:
        """Frees one of the device's blocks whose copy the host has, where there is one."""
        found = self._movable(np.zeros(0, dtype=np.int32))
        found = found[self._is_saved[found]]
        if not len(found):
            return False
        self._leave(int(found[np.argmin(self._read[found])]))
        return True

    def _settle(self, block: int, slot: int) -> None:
        self._free.pop(slot, None)
        self._slot[block] = self.codes[block] = slot
        self._id[slot] = block
        self._displaced -= slot == block

    def _leave(self, block: int) -> None:
        """Its place on the device is free, if it has one."""
        slot = int(self._slot[block])
        if slot >= 0:
            self._displaced += slot == block
            self._slot[block] = self.codes[block] = _NOWHERE
            self._id[slot] = _NOWHERE
            self._free[slot] = None

    def _number(self, blocks: Blocks) -> None:
        """Each of these has a buffer; others give theirs up as far as is needed."""
        missing = blocks[self._buffer[blocks] < 0]
        if len(missing) > len(self._free_buffers):
            idle = self._buffer >= 0
            idle[blocks] = False
            for block in np.flatnonzero(idle)[: len(missing) - len(self._free_buffers)].tolist():
                self._forget_buffer(block)
        if len(missing) > len(self._free_buffers):
            raise ValueError(f"{len(blocks)} blocks outside are read, and there are {self.buffers} buffers")
        for block in missing.tolist():
            self._buffer[block] = self._free_buffers.pop()

    def _forget_buffer(self, block: int) -> None:
        number = int(self._buffer[block])
        self._was_fetched[block] = False
        if number >= 0:
            self._buffer[block] = _NOWHERE
            if number < self.buffers:
                self._free_buffers.append(number)

    def _number_buffers(self) -> None:
        """Their count has changed: those there are keep their blocks."""
        self._buffer[self._buffer >= self.buffers] = _NOWHERE
        self._was_fetched[:] = False
        taken = set(self._buffer[self._buffer >= 0].tolist())
        self._free_buffers = [number for number in range(self.buffers) if number not in taken]
