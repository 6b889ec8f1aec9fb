"""What an engine is timed at before it serves."""

from collections.abc import Iterator

import pytest

from services.worker.engine.engine import CHUNK_TOKENS, LEAST_TOKENS, TorchEngine, prefill_tokens_per_s
from services.worker.engine.loading import describe
from shared.clock import Clock
from tests.services.worker.conftest import ModelFactory

BLOCK_TOKENS = 4


def ticking(*took_s: float) -> Clock:
    """Every round takes what is listed."""

    def times() -> Iterator[float]:
        now_s = 100.0
        for one_s in took_s:
            yield now_s
            now_s += one_s
            yield now_s

    return times().__next__


def test_the_fastest_round_counts_and_the_first_does_not(make_model: ModelFactory) -> None:
    engine = TorchEngine(describe(make_model("llama")), kv_blocks=6, block_tokens=BLOCK_TOKENS)
    assert prefill_tokens_per_s(engine, 6, ticking(0.001, 0.5, 0.25)) == pytest.approx(24 / 0.25)


def test_a_slow_engine_is_not_kept_from_serving_for_long(make_model: ModelFactory) -> None:
    engine = TorchEngine(describe(make_model("llama")), kv_blocks=6, block_tokens=BLOCK_TOKENS)
    assert prefill_tokens_per_s(engine, 6, ticking(3.0)) == pytest.approx(24 / 3.0)


def test_a_pool_too_small_for_a_measurement_is_not_measured(make_model: ModelFactory) -> None:
    blocks = LEAST_TOKENS // BLOCK_TOKENS - 1
    engine = TorchEngine(describe(make_model("llama")), kv_blocks=blocks, block_tokens=BLOCK_TOKENS)
    assert prefill_tokens_per_s(engine, blocks, ticking()) == 0.0


def test_no_more_than_one_chunk_is_computed(make_model: ModelFactory) -> None:
    engine = TorchEngine(describe(make_model("llama")), kv_blocks=64, block_tokens=BLOCK_TOKENS)
    tokens = min(CHUNK_TOKENS, engine.max_positions)
    assert prefill_tokens_per_s(engine, 64, ticking(0.1, 0.2, 0.4)) == pytest.approx(tokens / 0.2)
