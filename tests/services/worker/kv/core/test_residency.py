"""Whatever is taken, written, read, lent and given back, each block is found with what was last written to
it."""

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv.core.block_pool import BlockPool, RowShare
from services.worker.kv.core.grown_pool import GrownPool
from services.worker.kv.core.residency import Residency, StepPlan

BLOCK_TOKENS = 4
CACHED = 6
"""Rows that the cache may have."""


class Machine:
    """A device, its host memory and a pool over both; contents are numbers, a step's copies are made at
    once."""

    def __init__(self, device_blocks: int, ids: int, layers: int) -> None:
        self.rows = BlockPool(ids + CACHED, 1)
        outside = RowShare(self.rows, ids)
        self.residency = Residency(device_blocks, ids, layers, self._move, nullcontext(), outside)
        self.residency.is_intact = self.is_intact
        self.pool = GrownPool(device_blocks, BLOCK_TOKENS, self.residency)
        self.device: dict[int, int] = {}
        self.host: dict[int, int] = {}
        """By row."""
        self.cached: dict[int, tuple[int | None, int]] = {}
        """By row: the cache's, of which block in use, and what it has."""
        self.written: dict[int, int] = {}
        """By id in use: what it ought to have."""
        self.lent: dict[int, int] = {}
        """By place of the device: likewise, of what somebody else writes to."""
        self.clock = 0

    def outside_blocks(self) -> int:
        return sum(self.residency.is_outside(block) for block in range(self.residency.ids))

    def _move(self, plan: StepPlan) -> None:
        for row, slot in zip(plan.saved_to.tolist(), plan.saved_from.tolist(), strict=True):
            self.host[row] = self.device.get(slot, -1)
        for row, slot in zip(plan.loaded_from.tolist(), plan.loaded_to.tolist(), strict=True):
            self.device[slot] = self.host[row]

    def step(
        self,
        read: list[int],
        written: list[int],
        saved_share: float = 1.0,
        *,
        fails: bool = False,
        filled: Sequence[int] = (),
    ) -> None:
        """Reads are checked where the plan says they are; then the writes are made. `filled`: by others
        meanwhile, after they were saved."""
        residency = self.residency
        blocks = np.array([*read, *written], dtype=np.int32)
        assert len(residency.codes) > max(blocks, default=0)
        plan = residency.plan(blocks, np.array(written, dtype=np.int32))
        passing = [int(plan.place[at]) < 0 for at in range(len(plan.fetched))]
        buffers = [int(number) for number, is_passing in zip(plan.buffer, passing, strict=True) if is_passing]
        assert len(set(buffers)) == len(buffers) and max(buffers, default=-1) < residency.buffers.pairs
        for block in read:
            code = int(residency.codes[block])
            assert code >= 0
            if code >= residency.device_blocks:
                assert int(plan.fetched[code - residency.device_blocks]) == block
                found = self.host[int(plan.fetched_from[code - residency.device_blocks])]
            elif block in plan.fetched:
                found = self.host[residency.row_of(block)]  # Brought to where it stays.
                if not fails:
                    self.device[code] = found
            else:
                found = self.device[code]
            assert found == self.written[block]
        saved = int(saved_share * len(plan.saves))
        for row, slot in zip(plan.save_to[:saved].tolist(), plan.save_from[:saved].tolist(), strict=True):
            self.host[row] = self.device.get(slot, -1)
        for block in written:
            self.clock += 1
            slot = int(residency.codes[block])
            assert slot < residency.device_blocks
            self.device[slot] = self.written[block] = self.clock
        for block in filled:
            self.fill(block)
        residency.end(saved, is_complete=not fails)
        self.check_integrity()

    def fill(self, block: int) -> None:
        self.clock += 1
        slot = self.residency.slot_of(block)
        if slot is None:
            self.host[self.residency.row_of(block)] = self.clock
        else:
            self.device[slot] = self.clock
        self.residency.on_written(block)
        self.written[block] = self.clock

    # --- what a prefix cache does: rows of its own with what blocks have that nobody writes to any more

    def shared(self) -> list[int]:
        """Blocks of which the cache has a copy."""
        return [block for block, _ in self.cached.values() if block is not None]

    def keep(self, block: int) -> None:
        """The cache has a copy of it from now on, the block's own where that is as good."""
        if len(self.cached) == CACHED:
            return
        own = self.residency.saved_row(block)
        row = self.rows.allocate(1)[0] if own is None else own
        if own is None:
            slot, there = self.residency.slot_of(block), self.residency.row_of(block)
            self.host[row] = self.host[there] if slot is None else self.device[slot]
        self.cached[row] = block, self.host[row]
        self.residency.share(block, row)

    def forget(self, row: int) -> None:
        block, _ = self.cached.pop(row)
        if block is None or not self.residency.unshare(block):
            self.rows.release([row])

    def is_intact(self, block: int) -> bool:
        """One in five is found to be spoilt, when that could still be told."""
        self.clock += 1
        if self.clock % 5:
            return True
        self.forget(next(row for row, (one, _) in self.cached.items() if one == block))
        return False

    def check_integrity(self) -> None:
        self.residency.check_integrity()
        for block, value in self.written.items():
            slot = self.residency.slot_of(block)
            if slot is not None:
                assert self.device[slot] == value
            else:
                assert self.residency.is_outside(block)
                assert self.host[self.residency.row_of(block)] == value
        for row, (_, value) in self.cached.items():
            assert self.host[row] == value
        self.residency.check_rows(self.cached)
        for place, value in self.lent.items():
            assert self.device[place] == value


ACTS = "take give step step step lend return size fill fill keep keep forget".split()


@given(st.data(), st.integers(3, 8), st.integers(4, 12))
def test_every_block_is_found_wherever_it_is(data: st.DataObject, layers: int, device_blocks: int) -> None:
    machine = Machine(device_blocks, 3 * device_blocks, layers)
    pool, residency = machine.pool, machine.residency
    for _ in range(data.draw(st.integers(1, 40))):
        held = sorted(machine.written)
        loose = sorted(set(held) - set(machine.shared()))
        match data.draw(st.sampled_from(ACTS)):
            case "take" if pool.free_blocks:
                room = residency.room_blocks
                for block in pool.allocate(data.draw(st.integers(1, pool.free_blocks))):
                    if room is None or room > 0:
                        machine.step([], [block])
            case "give" if held:
                given_back = data.draw(st.lists(st.sampled_from(held), unique=True))
                pool.release(given_back)
                for block in given_back:
                    del machine.written[block]
                for row, (kept, value) in list(machine.cached.items()):
                    if kept in given_back:  # What the cache has of it stays.
                        machine.cached[row] = None, value
            case "step" if held:
                read = data.draw(st.lists(st.sampled_from(held), unique=True))
                room = device_blocks if residency.room_blocks is None else residency.room_blocks
                most = max(0, room - 1)
                wanted = (
                    data.draw(st.lists(st.sampled_from(loose), unique=True, max_size=most)) if loose else []
                )
                read = [block for block in read if block not in wanted]
                rest = [block for block in loose if block not in read and block not in wanted]
                filled = data.draw(st.lists(st.sampled_from(rest), unique=True)) if rest else []
                share = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
                machine.step(read, wanted, share, fails=data.draw(st.booleans()), filled=filled)
            case "lend":
                most = min(pool.lendable_blocks - 1, pool.free_blocks)
                if most > 0:
                    for place in pool.withdraw(pool.allocate(data.draw(st.integers(1, most)))):
                        machine.clock += 1
                        machine.lent[place] = machine.device[place] = machine.clock
            case "return" if machine.lent:
                back = data.draw(st.lists(st.sampled_from(sorted(machine.lent)), unique=True))
                if data.draw(st.booleans()):
                    pool.readmit(back)
                    for place in back:
                        del machine.lent[place]
                else:
                    for place, block in zip(back, pool.rejoin(back), strict=True):
                        machine.written[block] = machine.lent.pop(place)
            case "size" if not residency.spare_blocks:
                spare = data.draw(st.integers(1, device_blocks // 3))
                while not residency.reserve(spare):  # What is missing is copied out with each step.
                    machine.step([], [])
                pool.resize(min(residency.ids, device_blocks - spare + residency.buffers.pairs))
            case "size":
                pool.resize(device_blocks)
                if pool.excess_blocks:
                    continue
                pool.cut()
                residency.release(0)
            case "fill" if loose:
                machine.fill(data.draw(st.sampled_from(loose)))
            case "keep" if loose:
                machine.keep(data.draw(st.sampled_from(loose)))
            case "forget" if machine.cached:
                machine.forget(data.draw(st.sampled_from(sorted(machine.cached))))
        machine.check_integrity()


def full(device_blocks: int, layers: int, spare_blocks: int) -> Machine:
    """All blocks of the device are in use and saved; so many may leave it."""
    machine = Machine(device_blocks, 3 * device_blocks, layers)
    for block in machine.pool.allocate(device_blocks):
        machine.step([], [block])
    while not machine.residency.reserve(spare_blocks):
        machine.step([], [])
    return machine


def test_what_is_read_in_each_step_comes_back_as_soon_as_there_is_room() -> None:
    machine = full(8, layers=8, spare_blocks=2)
    assert machine.residency.buffers.pairs == 8
    machine.pool.resize(14)
    for block in machine.pool.allocate(6):
        machine.step([], [block])
    assert machine.outside_blocks() == 14 - 6
    machine.step(list(range(6)), [])
    machine.pool.release([13, 12])
    for block in (12, 13):
        del machine.written[block]
    machine.step(list(range(6)), [])
    assert machine.outside_blocks() == 12 - 6


def test_more_than_the_device_has_room_for_is_refused_and_nothing_changes() -> None:
    machine = full(6, layers=6, spare_blocks=2)
    machine.pool.resize(8)
    with pytest.raises(ValueError, match="may leave"):
        machine.step([], [0, 1, 2, 3, 4])
    machine.check_integrity()
