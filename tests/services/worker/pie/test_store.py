"""Waits, their accounting, errors of copies and changes of size; with real threads and a real throttle."""

import pytest
import torch

from services.worker.pie.copier import InlineCopier
from services.worker.pie.core.expansion import ExpansionController
from services.worker.pie.core.pool import ElasticPool
from services.worker.pie.core.sizes import slot_blocks
from services.worker.pie.resize import Growth
from services.worker.pie.store import LayerStore
from shared.clock import monotonic_s
from shared.errors import InternalError
from tests.services.worker.pie.rig import BLOCKS, LAYERS, SHAPE, make_store, step


class Written:
    """What each layer wrote last, looked at when it is computed again."""

    def __init__(self) -> None:
        self.expected = [0.0] * LAYERS

    def check_and_write(self, layer: int, keys: torch.Tensor) -> None:
        # What begins on the host was never written: nobody reads such blocks.
        assert self.expected[layer] == 0 or bool((keys[:BLOCKS] == self.expected[layer]).all())
        self.expected[layer] += layer + 1
        keys[:BLOCKS] = self.expected[layer]


def test_bytes_stay_and_waits_are_counted_by_layer() -> None:
    written = Written()
    with make_store(4, BLOCKS * SHAPE.block_bytes / 0.02) as store:  # far slower than a busy machine computes
        for _ in range(6):
            step(store, write=written.check_and_write)
        meter = store.meter
        assert meter.iterations == 6
        assert min(meter.moved_bytes.values()) >= BLOCKS * SHAPE.block_bytes * 6
        assert sum(meter.stall_s) > 0.02 and sum(meter.stalls) > 6
        assert meter.stall_share > 1


def test_a_store_without_a_queue_waits_for_nothing() -> None:
    with make_store(0, 1.0) as store:
        assert store.is_static
        for _ in range(3):
            step(store)
        assert store.meter.stall_share == 0 and sum(store.meter.moved_bytes.values()) == 0
        window = store.meter.close_window(3, store.controller, BLOCKS)
        assert (window.tokens, window.used_blocks, window.swap_ins) == (12, BLOCKS, 0)


def test_while_nothing_moves_nobody_is_asked_which_blocks_are_in_use() -> None:
    """A pool of thousands of blocks is walked through only where something is copied."""
    asked = [0]

    def used() -> list[int]:
        asked[0] += 1
        return list(range(BLOCKS))

    with make_store(0, 0.0) as store:
        store.attach(used, lambda: BLOCKS)
        step(store)
        assert asked == [0] and store.is_static
        store.set_fifo(4)
        for _ in range(3):
            step(store)
        assert 3 <= asked[0] <= 4 and sum(store.meter.moved_bytes.values()) > 0


def test_a_failed_copy_is_an_error_of_the_step() -> None:
    with make_store(4, 0.0) as store:
        store.attach(lambda: [0, 10_000])
        with pytest.raises(InternalError, match="a copy of KV failed"):
            for _ in range(3):
                step(store)


def test_without_overlap_a_copy_is_over_before_anything_goes_on() -> None:
    written = Written()

    def write(layer: int, keys: torch.Tensor) -> None:
        assert not store.controller.in_flight
        written.check_and_write(layer, keys)

    with make_store(4, 0.0, InlineCopier) as store:
        for _ in range(4):
            step(store, write=write)
        assert store.meter.copying_s > 0 and store.meter.stall_share == 0


def make_growth(
    store: LayerStore, notice_s: float = 0.0, controller: ExpansionController | None = None
) -> tuple[Growth, ElasticPool]:
    growth = Growth(store, BLOCKS, controller, 4, monotonic_s, notice_s=notice_s)
    pool = ElasticPool(BLOCKS, 4)
    growth.attach(pool)
    return growth, pool


def run(store: LayerStore, growth: Growth, steps: int = 1) -> None:
    for _ in range(steps):
        step(store)
        growth.after_step()
        store.check_integrity()


def test_it_grows_and_shrinks_and_what_lies_on_doomed_blocks_moves() -> None:
    with make_store(0, 0.0) as store:
        growth, pool = make_growth(store)
        held = pool.allocate(BLOCKS)
        pool.on_moved = lambda moves: held.__setitem__(slice(None), [moves.get(each, each) for each in held])
        growth.want(5)
        run(store, growth, 4)
        assert (pool.total_blocks, growth.capacity_blocks) == (slot_blocks(LAYERS, 5, BLOCKS), 16)
        assert (growth.is_resizing, pool.growable_blocks) == (False, 0)
        held += pool.allocate(6)
        growth.want(0)
        assert (pool.total_blocks, pool.doomed_blocks) == (16, 8)
        run(store, growth, 3)
        assert (growth.is_resizing, pool.total_blocks) == (True, 16)
        pool.release(held[:6])
        del held[:6]
        run(store, growth, 3)
        assert (growth.is_resizing, pool.total_blocks, pool.doomed_blocks) == (False, BLOCKS, 0)
        assert sorted(held) == pool.taken() == list(range(8)) and store.is_static
        pool.check_integrity(held)
        assert growth.expansion().details()["pie_fifo_layers"] == 0


def test_blocks_go_only_some_time_after_it_was_said() -> None:
    with make_store(0, 0.0) as store:
        growth, pool = make_growth(store, notice_s=30.0)
        growth.want(5)
        run(store, growth, 4)
        growth.want(0)
        run(store, growth, 4)
        assert (growth.is_resizing, pool.total_blocks, pool.doomed_blocks) == (True, 16, 8)


@pytest.mark.parametrize(("bandwidth", "capacity"), [(0.0, 9), (2e5, BLOCKS)])
def test_blocks_are_given_out_only_where_swaps_fit(bandwidth: float, capacity: int) -> None:
    tried = set()

    def work(layer: int, keys: torch.Tensor) -> None:
        tried.add(store.controller.fifo_layers)

    with make_store(0, bandwidth) as store:
        growth, pool = make_growth(store, controller=ExpansionController(LAYERS, 3))
        pool.allocate(BLOCKS)
        for _ in range(10):
            step(store, 0.003, work)
            growth.after_step()
        assert 3 in tried and pool.total_blocks == capacity
        assert growth.expansion().fifo_layers == (3 if capacity > BLOCKS else 0)
