"""What the host has of each layer: never stale, whatever is written, freed, moved, grown or shrunk meanwhile;
and each mark is needed."""

import random
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.pie import memory as bytes_of
from services.worker.pie.copier import InlineCopier, PacedLink, SwapDone, ThreadCopier, copied
from services.worker.pie.core.copies import HostCopies, Runs, count, first_blocks, pieces, runs_of, set_of
from services.worker.pie.core.sizes import slot_blocks
from services.worker.pie.core.swap import Direction, SwapController, Transfer
from services.worker.pie.memory import LayerMemory
from services.worker.pie.store import LayerStore
from shared.clock import monotonic_s
from tests.services.worker.pie.rig import BLOCKS, LAYERS, SHAPE, links, make_memory


def test_what_was_sent_is_not_sent_again() -> None:
    copies, used = HostCopies(2), set_of([0, 1, 4])
    assert copies.leave(1, used) == used
    assert copies.leave(1, used) == 0 and copies.arrive(1, used | 1 << 5) == used
    copies.on_written(1, set_of([1, 5]))
    assert copies.arrive(1, used) == set_of([0, 4]) and copies.leave(1, used | 1 << 5) == set_of([1, 5])
    assert copies.fresh(0) == 0 and copies.leave(0, used) == used


def test_moved_blocks() -> None:
    copies, used = HostCopies(2), set_of([0, 1, 6])
    for layer in range(2):
        copies.leave(layer, used)
    copies.on_moved(0, {6: 1})
    assert copies.fresh(0) == set_of([0, 6])
    assert copies.on_renamed(1, {6: 3, 7: 1}) == {6: 3}, "nothing was ever sent of block 7"
    assert copies.fresh(1) == set_of([0, 3, 6])
    copies.cut(4)
    assert copies.fresh(0) == set_of([0]) and copies.fresh(1) == set_of([0, 3])
    copies.forget(1)
    assert (copies.fresh(0), copies.fresh(1)) == (1, 0)
    copies.forget_all()
    assert copies.fresh(0) == 0


class LateCopier:
    """Real copies, complete at some later look: any order of events that there can be."""

    poll_interval_s = 0.0

    def __init__(self, memory: LayerMemory, dice: random.Random) -> None:
        self._memory, self._dice = memory, dice
        self._link = PacedLink(0.0, monotonic_s, time.sleep)
        self._flying: list[tuple[Transfer, Runs]] = []
        self._done: SwapDone | None = None

    def start(self, done: SwapDone) -> None:
        self._done = done

    def submit(self, transfer: Transfer, runs: Runs) -> None:
        self._flying.append((transfer, runs))

    def before_layer(self) -> None:
        """Nothing: a completed copy is visible."""

    def after_layer(self) -> None:
        self.poll()

    def poll(self) -> None:
        while self._flying and self._dice.random() < 0.6:
            transfer, runs = self._flying.pop(self._dice.randrange(len(self._flying)))
            assert self._done is not None
            self._done(transfer, copied(self._memory, self._link, transfer, runs), 0.0, None)

    def close(self, deadline_s: float) -> bool:
        return True


Make = Callable[[LayerMemory, random.Random], Any]


def by_threads(memory: LayerMemory, dice: random.Random) -> ThreadCopier:
    """A layer takes half a millisecond."""
    return ThreadCopier(memory, links(BLOCKS * SHAPE.block_bytes / 0.0005), monotonic_s)


def inline(memory: LayerMemory, dice: random.Random) -> InlineCopier:
    return InlineCopier(memory, links(), monotonic_s)


def filled(block: torch.Tensor, value: float) -> torch.Tensor:
    """As large, and with another number in every place."""
    return value + torch.arange(block.numel()).view(block.shape) / block.numel()


class World:
    """Owners of blocks who know what they wrote, over a store; everything that changes it happens here."""

    def __init__(self, seed: int, kept_layers: int, make: Make = LateCopier) -> None:
        self.dice = random.Random(seed)
        memory = make_memory(LAYERS, BLOCKS)
        controller = SwapController(LAYERS, 0, kept_layers)
        self.store = LayerStore(controller, memory, make(memory, self.dice), monotonic_s, wait_timeout_s=20.0)
        self.used: set[int] = set()
        self.expected: list[dict[int, float]] = [{} for _ in range(LAYERS)]
        self.total = BLOCKS
        self._written = 0.0
        self.store.attach(lambda: sorted(self.used))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._take_and_give_back()
            self._step()
            self.store.check_integrity()
            self._resize()
            if self.dice.random() < 0.2:
                self._move([each for each in self.used if self.dice.random() < 0.3])

    def _take_and_give_back(self) -> None:
        for block in [each for each in sorted(self.used) if self.dice.random() < 0.15]:
            self.used.remove(block)
            for layer in self.expected:
                layer.pop(block, None)
        for _ in range(self.dice.randrange(4)):
            if free := [each for each in range(self.total) if each not in self.used]:
                self.used.add(free[0] if self.dice.random() < 0.7 else self.dice.choice(free))

    def _step(self) -> None:
        written = [each for each in sorted(self.used) if self.dice.random() < 0.3]
        ends = self.dice.randrange(LAYERS) if self.dice.random() < 0.1 else LAYERS
        self.store.step_begins([], [written])
        for layer in range(LAYERS):
            pools = self.store.enter(layer)
            for block, value in self.expected[layer].items():
                for pool in pools:
                    is_fresh = torch.equal(pool[block], filled(pool[block], value))
                    assert is_fresh, f"block {block} of layer {layer} is stale"
            self._written += 1.0
            for block in written:
                self.expected[layer][block] = self._written
                for pool in pools:
                    pool[block] = filled(pool[block], self._written)
            if layer == ends:  # The step breaks off, in the middle of a layer.
                return
            self.store.leave(layer)
        self.store.step_ends(len(written), is_decoding=True)

    def _resize(self) -> None:
        controller = self.store.controller
        if controller.excess_slots < 0 or controller.can_retire_slot:
            self.store.resize()
        if controller.excess_slots:
            return
        self.total = slot_blocks(LAYERS, controller.fifo_layers, BLOCKS)
        if self.dice.random() < 0.3:
            wanted = self.dice.choice([0, 3, 4, 5])
            total = slot_blocks(LAYERS, wanted, BLOCKS)
            if total >= self.total or self._drain(total):
                self.total = min(self.total, total)
                self.store.set_fifo(wanted)

    def _drain(self, total: int) -> bool:
        self._move([each for each in self.used if each >= total], total)
        return all(each < total for each in self.used)

    def _move(self, blocks: list[int], total: int | None = None) -> None:
        free = [each for each in range(total or self.total) if each not in self.used]
        pairs = zip(sorted(blocks, reverse=True), free, strict=False)
        moves = {block: to for block, to in pairs if to < block}
        if not moves:
            return
        for wrong in ({to: block for block, to in moves.items()}, {block: block for block in moves}):
            with pytest.raises(ValueError, match="down only"):
                self.store.move_blocks(wrong)
        self.used = self.used - set(moves) | set(moves.values())  # As a pool does, before the bytes follow.
        self.store.move_blocks(moves)
        for block, to in moves.items():
            for layer in self.expected:
                if block in layer:
                    layer[to] = layer.pop(block)


@given(seed=st.integers(0, 1 << 30), kept_layers=st.sampled_from([0, 2, LAYERS]), holes=st.booleans())
@settings(max_examples=25)
def test_no_stale_block_ever_comes_back(seed: int, kept_layers: int, holes: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bytes_of, "_HOLE_BYTES", 3 * SHAPE.block_bytes if holes else 0)
        world = World(seed, kept_layers)
        world.run(60)
    assert min(world.store.meter.moved_bytes.values()) > 0


@pytest.mark.parametrize("holes", [True, False])
@pytest.mark.parametrize("make", [by_threads, inline])
@pytest.mark.parametrize("kept_layers", [0, 2, LAYERS])
def test_nor_with_the_real_copiers(
    make: Make, kept_layers: int, holes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not holes:
        monkeypatch.setattr(bytes_of, "_HOLE_BYTES", 0)
    world = World(kept_layers, kept_layers, make)
    try:
        world.run(80)
    finally:
        assert world.store.close(5.0)
    assert min(world.store.meter.moved_bytes.values()) > 0


def _reserve_without_a_word(self: LayerMemory, host_slot: int) -> bool:
    _RESERVE(self, host_slot)
    return False


_RESERVE = LayerMemory.reserve


@pytest.mark.parametrize(
    ("where", "name", "kept_layers"),
    [
        (HostCopies, "on_written", LAYERS),
        (HostCopies, "on_moved", LAYERS),
        (HostCopies, "forget_all", LAYERS),
        (HostCopies, "forget", 0),
        (LayerMemory, "rename_blocks", LAYERS),
        (LayerMemory, "reserve", LAYERS),
    ],
)
def test_a_mark_that_is_left_out_is_found_out(
    where: type, name: str, kept_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every place that makes a copy stale: without its mark the property above does not hold."""
    left_out = _reserve_without_a_word if name == "reserve" else lambda *_: None
    monkeypatch.setattr(where, name, left_out)
    found = 0
    for seed in range(12):
        world = World(seed, kept_layers)
        world.store.check_integrity = lambda: None  # type: ignore[method-assign]
        try:
            world.run(60)
        except AssertionError as error:
            assert "is stale" in str(error)
            found += 1
    assert found, f"nobody missed {name}"


def test_a_copy_out_sends_what_was_written_alone() -> None:
    """Where the layer keeps its place on the host; else all that is in use."""
    sent = {}
    for kept_layers in (0, LAYERS):
        world = World(1, kept_layers, inline)
        store, world.used = world.store, set(range(BLOCKS))
        store.set_fifo(4)
        for step in range(24):
            if step == 12:
                before = dict(store.meter.moved_bytes)
            store.step_begins([], [[step % BLOCKS]])
            for layer in range(LAYERS):
                store.enter(layer)[0][step % BLOCKS] = torch.tensor(float(step))
                store.leave(layer)
            store.step_ends(1, is_decoding=True)
            if store.controller.can_retire_slot:
                store.resize()
        sent[kept_layers] = {each: store.meter.moved_bytes[each] - before[each] for each in Direction}
    whole, written = sent[0], sent[LAYERS]
    assert whole[Direction.OUT] == whole[Direction.IN] == written[Direction.IN] > 0
    assert written[Direction.OUT] == whole[Direction.OUT] / BLOCKS


BLOCK_SETS = st.sets(st.integers(0, 60)).map(sorted)


def test_runs_with_and_without_holes() -> None:
    blocks = set_of([0, 1, 2, 5, 6, 10])
    assert blocks == 0b10001100111
    assert runs_of(blocks) == ((0, 3), (5, 7), (10, 11))
    assert runs_of(blocks, 2) == ((0, 7), (10, 11)) and runs_of(blocks, 3) == ((0, 11),)
    assert runs_of(0) == () and set_of([]) == 0
    assert runs_of(blocks, 3, fillable=set_of([3, 4, 7, 8])) == ((0, 7), (10, 11))
    assert count(runs_of(blocks)) == 6
    assert list(pieces(((0, 5), (8, 9)), 2)) == [(0, 2), (2, 4), (4, 5), (8, 9)]


@given(blocks=BLOCK_SETS, hole=st.integers(0, 5), limit=st.integers(1, 70))
def test_no_block_is_left_out_and_none_is_twice(blocks: list[int], hole: int, limit: int) -> None:
    runs = runs_of(set_of(blocks), hole)
    covered = [block for first, end in runs for block in range(first, end)]
    assert covered == sorted(set(covered)) and set(blocks) <= set(covered)
    if not hole:
        assert covered == blocks
    assert all(second[0] - first[1] > hole for first, second in pairwise(runs))
    kept = runs_of(set_of(blocks) & first_blocks(limit))
    assert [block for first, end in kept for block in range(first, end)] == [
        block for block in blocks if block < limit
    ]
    assert [block for first, end in pieces(runs, 3) for block in range(first, end)] == covered
