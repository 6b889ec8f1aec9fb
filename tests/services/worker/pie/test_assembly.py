"""Through the real engine: greedy text is the same with Pie on and off, growing and shrinking while it
runs."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from services.worker.core.settings import PieSettings
from services.worker.engine.engine import TorchEngine
from services.worker.engine.loading import describe
from services.worker.engine.native.library import AttentionMode
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.grown_pool import GrownPool
from services.worker.pie.blocks import BlockPie
from services.worker.pie.core.sizes import slot_blocks
from shared.errors import ConfigError, InternalError
from tests.services.worker.conftest import VOCABULARY
from tests.services.worker.engine.rig import BLOCK_TOKENS, GREEDY, Sequences
from tests.services.worker.pie.conftest import LAYERS

BANDWIDTH = 40e6
MODES: tuple[AttentionMode, ...] = ("native", "torch")


@contextmanager
def engine_of(model: Any, mode: AttentionMode, kv_blocks: int, **settings: Any) -> Iterator[TorchEngine]:
    pie = PieSettings(enabled=bool(settings), notice_s=0.0, **settings)
    engine = TorchEngine(
        describe(model), kv_blocks=kv_blocks, block_tokens=BLOCK_TOKENS, attention=mode, pie=pie
    )
    try:
        yield engine
    finally:
        if engine.pie is not None:
            engine.pie.close()


def check_integrity(engine: TorchEngine) -> None:
    if isinstance(engine.pie, BlockPie):
        engine.pie.kv.residency.check_integrity()


def prompts() -> list[list[int]]:
    dice = random.Random(3)
    return [[dice.randrange(VOCABULARY) for _ in range(length)] for length in (1, 7, 18, 33)]


def answers(engine: TorchEngine, pool: BlockPool, steps: int) -> list[list[int]]:
    """Chunks, decodes, preemptions; a change of size wherever the engine makes one."""
    dice, sequences = random.Random(5), Sequences(engine, pool, prompts(), GREEDY)
    for step in range(steps):
        if step in (9, 21):
            sequences.preempt(step % 3)
        sequences.step([0, 1, 2, 3], most_tokens=dice.choice((5, 11, 64)))
        check_integrity(engine)
    return [sequences.answer(index, 16) for index in range(4)]


def plainly(model: Any, mode: AttentionMode, kv_blocks: int, steps: int) -> list[list[int]]:
    with engine_of(model, mode, kv_blocks) as plain:
        return answers(plain, plain.make_pool(), steps)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fifo_layers", [0, 3, 5])
def test_the_text_is_the_same_with_a_fixed_level(llama: Any, mode: AttentionMode, fifo_layers: int) -> None:
    expected = plainly(llama, mode, 64, 34)
    settings = {"expansion": "fixed", "fifo_layers": fifo_layers, "bandwidth_limit": BANDWIDTH}
    device_blocks = {0: 64, 3: 44, 5: 27}[fifo_layers]  # Blocks are swapped only where there are too few.
    with engine_of(llama, mode, device_blocks, **settings) as swapped:
        assert isinstance(swapped.pie, BlockPie)
        assert swapped.kv_blocks == int({0: 1, 3: 1.2, 5: 2}[fifo_layers] * device_blocks)
        assert answers(swapped, swapped.make_pool(), 34) == expected
        meter = swapped.pie.meter
        assert (min(meter.moved_bytes.values()) > 0) == (fifo_layers > 0)
        assert meter.stall_s > 0 or fifo_layers < 5
        figures = swapped.pie.kv.figures()
        assert figures.layers % LAYERS == 0 and (figures.fetch_s > 0) == (fifo_layers > 0)
        assert 0 <= figures.early <= figures.layers


@pytest.mark.parametrize("mode", MODES)
def test_the_text_is_the_same_while_blocks_leave_and_come_back(llama: Any, mode: AttentionMode) -> None:
    expected = plainly(llama, mode, 64, 40)
    with engine_of(llama, mode, 34, expansion="auto", window_iterations=1000) as engine:
        pie = engine.pie
        assert isinstance(pie, BlockPie)
        pool = engine.make_pool()
        assert isinstance(pool, GrownPool)
        sequences = Sequences(engine, pool, prompts(), GREEDY)
        dice, sizes = random.Random(2), set()
        for _ in range(60):
            if not pie.is_resizing:
                held = sum(map(len, sequences.blocks))
                fitting = [level for level in (0, 3, 4, 5) if slot_blocks(LAYERS, level, 34) > held + 8]
                pie.want(dice.choice(fitting or [5]))
            running = [at for at in range(4) if pool.free_blocks > 20 or sequences.computed[at]]
            if len(running) < 4 or pool.free_blocks < 6:
                sequences.preempt(max(range(4), key=lambda at: len(sequences.blocks[at])))
            sequences.step(running or [0], most_tokens=16)
            pie.kv.residency.check_integrity()
            pool.check_integrity([block for blocks in sequences.blocks for block in blocks])
            assert pool.lasting_blocks == pie.capacity_blocks
            sizes.add(pool.lasting_blocks)
        answered = [sequences.answer(index, 16) for index in range(4)]
        assert all(text == full[: len(text)] for text, full in zip(answered, expected, strict=True))
        assert sum(map(len, answered)) > 48
        assert sizes == {34, 40, 51, 68}


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_writes_to_more_than_the_device_holds_is_made_in_parts(
    llama: Any, mode: AttentionMode
) -> None:
    expected = plainly(llama, mode, 64, 34)
    with engine_of(llama, mode, 27, expansion="fixed", fifo_layers=5) as engine:
        sequences = Sequences(engine, engine.make_pool(), prompts(), GREEDY)
        for _ in range(4):
            sequences.step([0, 1, 2, 3], most_tokens=64)
            sequences.preempt(3)
            sequences.preempt(2)
        for _ in range(17):
            sequences.step([0, 1, 2, 3], most_tokens=64)
        assert [sequences.answer(index, 16) for index in range(4)] == expected


@pytest.mark.parametrize(("bandwidth", "is_raised"), [(1e5, False), (0.0, True)])
def test_blocks_leave_only_where_the_link_is_fast_enough(
    llama: Any, bandwidth: float, is_raised: bool
) -> None:
    with engine_of(llama, "native", 24, window_iterations=4, bandwidth_limit=bandwidth) as engine:
        pie = engine.pie
        assert isinstance(pie, BlockPie)
        pool, sizes = engine.make_pool(), set()
        pool.allocate(pool.free_blocks - 8)
        for _ in range(6):
            sequences = Sequences(engine, pool, [[1, 2, 3]] * 4, GREEDY)
            for _ in range(5):
                sequences.step([0, 1, 2, 3], most_tokens=64)
                sizes.add(pool.total_blocks)
                assert is_raised or pie.kv.residency.is_plain
            for index in range(4):
                sequences.preempt(index)
        assert (max(sizes) > 24) == is_raised


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_that_does_not_arrive_is_an_error(llama: Any, mode: AttentionMode) -> None:
    """And the next step finds everything in order."""
    settings = {"expansion": "fixed", "fifo_layers": 5, "bandwidth_limit": 2e4}
    with engine_of(llama, mode, 24, **settings) as engine:
        assert engine.pie is not None
        engine.pie.kv._timeout_s = 0.05
        sequences = Sequences(engine, engine.make_pool(), [[1] * 36] * 4, GREEDY)
        with pytest.raises(InternalError, match="did not arrive from the host within"):
            for _ in range(5):
                sequences.step([0, 1, 2, 3], most_tokens=12)
        assert isinstance(engine.pie, BlockPie)
        engine.pie.kv.residency.check_integrity()
        engine.pie.kv.pace(0.0)
        for index in range(4):
            sequences.preempt(index)
        for _ in range(4):
            sequences.step([0, 1, 2, 3], most_tokens=12)
        sequences.step([0, 1, 2, 3], most_tokens=12)
        check_integrity(engine)


def test_a_level_that_there_is_not_is_a_configuration_error(llama: Any) -> None:
    for settings in ({"fifo_layers": 2}, {"fifo_layers": 6}):
        with pytest.raises(ConfigError, match="is no level"), engine_of(llama, "torch", 64, **settings):
            pass
