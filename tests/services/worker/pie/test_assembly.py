"""Through the real engine: greedy text is the same with Pie on and off, growing and shrinking while it
runs.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers

from services.worker.engine.engine import TorchEngine
from services.worker.engine.loading import describe
from services.worker.engine.native.library import AttentionMode
from services.worker.kv.core.block_pool import BlockPool
from services.worker.pie.core.pool import ElasticPool
from services.worker.pie.core.swap import Direction
from services.worker.pie.settings import PieSettings
from shared.errors import ConfigError, InternalError
from tests.services.worker.conftest import VOCABULARY
from tests.services.worker.engine.rig import BLOCK_TOKENS, GREEDY, Sequences

LAYERS = 6
BANDWIDTH = 40e6
MODES: tuple[AttentionMode, ...] = ("native", "torch")


@pytest.fixture(scope="module")
def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
        max_position_embeddings=256,
        initializer_range=0.5,
        tie_word_embeddings=True,
    )
    torch.manual_seed(7)
    model: Any = transformers.LlamaForCausalLM(config)
    return model.eval()


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
            assert engine.pie.store.close(5.0)


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
        if engine.pie is not None:
            engine.pie.store.check_integrity()
    return [sequences.answer(index, 16) for index in range(4)]


def plainly(model: Any, mode: AttentionMode, kv_blocks: int, steps: int) -> list[list[int]]:
    """What is answered without Pie."""
    with engine_of(model, mode, kv_blocks) as plain:
        return answers(plain, plain.make_pool(), steps)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fifo_layers", [0, 3, 5])
def test_the_text_is_the_same_with_a_fixed_queue(llama: Any, mode: AttentionMode, fifo_layers: int) -> None:
    expected = plainly(llama, mode, 64, 34)
    settings = {"expansion": "fixed", "fifo_layers": fifo_layers, "bandwidth_limit": BANDWIDTH}
    with engine_of(llama, mode, 64, **settings) as swapped:
        assert swapped.pie is not None
        assert swapped.kv_blocks == {0: 64, 3: 76, 5: 128}[fifo_layers]
        assert answers(swapped, swapped.make_pool(), 34) == expected
        meter = swapped.pie.store.meter
        assert (min(meter.moved_bytes.values()) > 0) == (fifo_layers > 0)
        assert (sum(meter.stall_s) > 0) or fifo_layers < 5


@pytest.mark.parametrize(("host_mb", "kept_layers"), [(1, 0), (2, LAYERS)])
def test_the_text_is_the_same_where_the_host_has_room_for_the_queue_alone(
    llama: Any, host_mb: int, kept_layers: int
) -> None:
    expected = plainly(llama, "native", 256, 34)
    settings = {"expansion": "fixed", "fifo_layers": 3, "bandwidth_limit": BANDWIDTH, "host_mb": host_mb}
    with engine_of(llama, "native", 256, **settings) as swapped:
        assert swapped.pie is not None
        store = swapped.pie.store
        assert store.controller.table.kept_layers == kept_layers
        assert answers(swapped, swapped.make_pool(), 34) == expected
        moved_in, moved_out = (store.meter.moved_bytes[each] for each in (Direction.IN, Direction.OUT))
        assert (moved_out < 0.7 * moved_in) == (kept_layers > 0)


@pytest.mark.parametrize("mode", MODES)
def test_the_text_is_the_same_while_slots_grow_and_shrink(llama: Any, mode: AttentionMode) -> None:
    expected = plainly(llama, mode, 64, 40)
    with engine_of(llama, mode, 64, expansion="fixed") as engine:
        pie = engine.pie
        assert pie is not None
        pool = engine.make_pool()
        assert isinstance(pool, ElasticPool)
        sequences = Sequences(engine, pool, prompts(), GREEDY)
        dice, sizes = random.Random(2), set()
        for step in range(60):
            if not pie.growth.is_resizing:
                pie.growth.want(dice.choice([0, 3, 4, 5]))
            if step in (20, 30):
                sequences.preempt(step // 10)
            sequences.step([0, 1, 2, 3], most_tokens=64)
            pie.store.check_integrity()
            pool.check_integrity([block for blocks in sequences.blocks for block in blocks])
            assert pool.lasting_blocks == pie.growth.capacity_blocks
            sizes.add(pool.lasting_blocks)
        assert [sequences.answer(index, 16) for index in range(4)] == expected
        assert sizes == {64, 76, 96, 128}


def test_a_link_that_is_too_slow_is_found_out_before_blocks_are_given_out(llama: Any) -> None:
    with engine_of(llama, "native", 40, window_iterations=4, bandwidth_limit=2e6) as engine:
        pie = engine.pie
        assert pie is not None
        pool, tried = engine.make_pool(), []
        pool.allocate(pool.free_blocks - 8)
        for _ in range(6):
            sequences = Sequences(engine, pool, [[1, 2, 3]] * 4, GREEDY)
            for _ in range(5):
                sequences.step([0, 1, 2, 3], most_tokens=64)
                tried.append(pie.store.controller.fifo_layers)
                assert pool.total_blocks == 40
            for index in range(4):
                sequences.preempt(index)
        assert 3 in tried and tried[-1] == 0


def test_a_layer_that_does_not_arrive_is_an_error(llama: Any) -> None:
    settings = {"expansion": "fixed", "fifo_layers": 5, "bandwidth_limit": 2e4, "wait_timeout_s": 0.05}
    with (
        engine_of(llama, "native", 64, **settings) as engine,
        pytest.raises(InternalError, match="did not arrive within"),
    ):
        sequences = Sequences(engine, engine.make_pool(), [[1] * 40] * 4, GREEDY)
        for _ in range(3):
            sequences.step([0, 1, 2, 3], most_tokens=64)


def test_a_queue_that_does_not_fit_is_a_configuration_error(llama: Any) -> None:
    for settings in ({"fifo_layers": 2}, {"fifo_layers": 6}):
        with pytest.raises(ConfigError, match="cannot be swapped"), engine_of(llama, "torch", 64, **settings):
            pass
