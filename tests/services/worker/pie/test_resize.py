"""A change of size from begin to end, on a real store with real copies."""

import pytest
import torch

from services.worker.pie.core.expansion import ExpansionController
from services.worker.pie.core.pool import ElasticPool
from services.worker.pie.core.sizes import slot_blocks
from services.worker.pie.resize import Growth
from services.worker.pie.store import LayerStore
from shared.clock import monotonic_s
from tests.services.worker.pie.rig import BLOCKS, LAYERS, make_store, step


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
