"""Pie where nobody has asked for it: for a sequence that is too long, and where it is foreseen to pay."""

import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from services.worker.core.sampling import SamplePoint
from services.worker.core.settings import PieSettings
from services.worker.engine.contract import Row
from services.worker.engine.engine import TorchEngine, decode_cost
from services.worker.engine.loading import describe
from services.worker.kv.core.grown_pool import GrownPool
from services.worker.pie.blocks import BlockPie
from services.worker.pie.core.meter import DecodeCost
from services.worker.pie.core.sizes import LEAST_FIFO_LAYERS, slot_blocks
from shared.messages.sequence import Sampling
from tests.services.worker.engine.rig import BLOCK_TOKENS
from tests.services.worker.pie.conftest import LAYERS

KV_BLOCKS, WINDOW = 60, 4
POINT = SamplePoint(Sampling(seed=0, max_tokens=1, temperature=0.0), 0, 0)
ROWS_ARE_CHEAP, ROWS_ARE_ALL = DecodeCost(0.1, 0.0001), DecodeCost(0.0, 0.01)


class AtWork:
    """A worker that decodes in all that it has, at whatever time it is said to be."""

    def __init__(self, engine: TorchEngine) -> None:
        assert isinstance(engine.pie, BlockPie)
        self.engine = engine
        self.growth: BlockPie = engine.pie
        self.now_s = 0.0
        self.growth._clock = self.tick
        pool = engine.make_pool()
        assert isinstance(pool, GrownPool)
        self.pool = pool
        self.held: list[int] = []

    def steps(self, windows: int) -> None:
        """Each of eight rows, that have seen all blocks in use."""
        each = -(-len(self.held) // 8)
        tables = [self.held[first : first + each] for first in range(0, len(self.held), each or 1)]
        rows = [Row([1], len(table) * BLOCK_TOKENS - 1, table, POINT) for table in tables]
        for _ in range(windows * WINDOW):
            if rows:
                self.engine.step(rows)
            else:
                self.growth.step_begins()
                self.growth.step_ends(0, is_decoding=True)

    def tick(self) -> float:
        """Each look at the clock takes a moment."""
        self.now_s += 0.02
        return self.now_s

    def fill(self) -> None:
        self.held += self.pool.allocate(self.pool.free_blocks)

    def release(self) -> None:
        self.pool.release(self.held)
        self.held = []


@pytest.fixture
def worker(llama: Any) -> Iterator[AtWork]:
    settings = PieSettings(enabled="auto", window_iterations=WINDOW, notice_s=0.0)
    engine = TorchEngine(describe(llama), kv_blocks=KV_BLOCKS, block_tokens=BLOCK_TOKENS, pie=settings)
    yield AtWork(engine)
    assert engine.pie is not None
    engine.pie.close()


@pytest.mark.parametrize(("missing_bytes", "is_there"), [(0, True), (1, False)])
def test_without_host_memory_for_a_level_it_is_left_out(
    llama: Any, missing_bytes: int, is_there: bool
) -> None:
    """It would take as much host memory as there is KV, and a GPU's steps would not overlap."""
    model = describe(llama)
    level_bytes = slot_blocks(LAYERS, LEAST_FIFO_LAYERS, KV_BLOCKS) * model.block_bytes(BLOCK_TOKENS)
    host_bytes, pie = level_bytes - missing_bytes, PieSettings()
    engine = TorchEngine(model, kv_blocks=KV_BLOCKS, block_tokens=BLOCK_TOKENS, pie=pie, pie_bytes=host_bytes)
    assert (engine.pie is not None) == is_there
    if engine.pie is not None:
        engine.pie.close()


@pytest.mark.parametrize("cost", [None, ROWS_ARE_ALL])
def test_it_never_rises_by_itself_where_more_rows_bring_nothing(
    worker: AtWork, cost: DecodeCost | None
) -> None:
    worker.growth.decode_cost = cost
    worker.fill()
    worker.steps(50)
    assert worker.growth.capacity_blocks == KV_BLOCKS


def test_it_rises_where_more_rows_pay_and_memory_is_full_by_twice_as_much_at_most(worker: AtWork) -> None:
    worker.growth.decode_cost = ROWS_ARE_CHEAP
    worker.steps(20)
    assert worker.growth.capacity_blocks == KV_BLOCKS, "nothing is in use"
    worker.fill()
    before, rises = KV_BLOCKS, 0
    for _ in range(30):
        worker.steps(1)
        now = worker.growth.capacity_blocks
        assert now <= 2 * before
        rises, before = rises + (now > before), now
        worker.release()
        worker.fill()
    assert rises and before > KV_BLOCKS
    worker.release()
    worker.steps(200)
    assert worker.growth.capacity_blocks == KV_BLOCKS, "what nobody uses goes back"


def test_steps_are_measured_only_while_memory_is_short(worker: AtWork) -> None:
    worker.growth.decode_cost = ROWS_ARE_ALL
    worker.held = worker.pool.allocate(KV_BLOCKS // 2)
    worker.steps(2)
    assert worker.growth.meter.iterations == 0
    worker.fill()
    worker.steps(2)
    assert worker.growth.meter.iterations == 2 * WINDOW
    worker.release()
    worker.held = worker.pool.allocate(1)
    worker.steps(3)
    assert worker.growth.meter.iterations == 3 * WINDOW, "the window that finds room is the last"


def test_it_rises_for_a_sequence_that_is_too_long_and_goes_back_after_it(worker: AtWork) -> None:
    needed = worker.growth.most_blocks - 5
    worker.growth.demand(needed)
    worker.steps(1)
    assert worker.growth.capacity_blocks >= needed
    worker.fill()
    worker.steps(40)
    assert worker.growth.capacity_blocks >= needed, "it is in use"
    worker.release()
    worker.steps(40)
    assert worker.growth.capacity_blocks == KV_BLOCKS


def test_what_runs_stays_beside_a_sequence_that_is_too_long(worker: AtWork) -> None:
    """It waited for nearly all of them to end."""
    worker.fill()
    needed = KV_BLOCKS + 5
    worker.growth.demand(needed)
    worker.steps(1)
    assert 2 * KV_BLOCKS <= worker.growth.capacity_blocks < needed + KV_BLOCKS, "twice the device at most"
    worker.growth.demand(needed)
    worker.steps(1)
    assert worker.growth.capacity_blocks >= 2 * KV_BLOCKS


def test_what_is_noted_of_steps_does_not_pile_up(llama: Any) -> None:
    """Nor where no level is to be found, so that nobody asks for it."""
    settings = PieSettings(enabled=True, expansion="fixed", fifo_layers=3, window_iterations=WINDOW)
    engine = TorchEngine(describe(llama), kv_blocks=KV_BLOCKS, block_tokens=BLOCK_TOKENS, pie=settings)
    worker = AtWork(engine)
    worker.fill()
    worker.steps(50)
    few = len(pickle.dumps(worker.growth.meter))
    worker.steps(100)
    assert len(pickle.dumps(worker.growth.meter)) < 1.2 * few
    assert engine.pie is not None
    engine.pie.close()


def test_what_a_step_costs_is_measured(llama: Any) -> None:
    engine = TorchEngine(describe(llama), kv_blocks=KV_BLOCKS, block_tokens=BLOCK_TOKENS)
    times = iter(range(100))
    cost = decode_cost(engine, KV_BLOCKS, clock=lambda: float(next(times)))
    assert cost == DecodeCost(1.0, 0.0), "each step took as long"
    assert decode_cost(engine, 1) is None
