"""The engine without a model: hashes for tokens, a cost model for time, KV that shows when it is wrong."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from services.worker.config import WorkerConfig
from services.worker.core.costs import find_cost
from services.worker.core.sampling import SamplePoint
from services.worker.core.settings import SimulatedConfig
from services.worker.engine.contract import AttendingEngine, Engine, Row
from services.worker.engine.simulated import SimulatedEngine, answer_tokens, token_at
from services.worker.kv.store import CacheableEngine
from services.worker.kv.tiers.records import Records
from shared.config import load
from shared.errors import ConfigError, InternalError
from shared.messages.sequence import Sampling

COST = find_cost("opt-13b-a100")
VOCABULARY = 4096
END = 2


def make(speed: float = 1.0) -> tuple[SimulatedEngine, list[float]]:
    """Return an engine, and the list of the seconds that its steps take."""
    slept: list[float] = []
    sizes: dict[str, Any] = {
        "vocabulary": VOCABULARY,
        "max_positions": 4096,
        "kv_blocks": 16,
        "block_tokens": 4,
    }
    return SimulatedEngine(**sizes, cost=COST, speed=speed, sleep=slept.append), slept


def sampling(seed: int = 7, *, ends: tuple[int, ...] = (END,), least: int = 0) -> Sampling:
    return Sampling(seed=seed, max_tokens=4000, end_token_ids=ends, min_tokens=least)


def answer(seed: int, choice: int = 0, **fields: object) -> list[int]:
    """Until it ends by itself, or to 4,000 tokens."""
    how = sampling(seed, **fields)  # type: ignore[arg-type]
    tokens: list[int] = []
    while len(tokens) < 4000 and END not in tokens:
        tokens.append(token_at(how, choice, len(tokens), VOCABULARY))
    return tokens


def test_it_is_an_engine_whose_kv_can_be_copied_and_no_more() -> None:
    engine, _ = make()
    as_engine: Engine = engine
    assert as_engine.weights and isinstance(engine, CacheableEngine)
    assert not isinstance(engine, AttendingEngine)
    assert engine.prefill_tokens_per_s == pytest.approx(128 / COST.step_s([(0, 128)], 0, 0))


def test_answers_depend_on_seed_choice_and_index_alone() -> None:
    texts = {(seed, choice): answer(seed, choice) for seed in range(20) for choice in range(2)}
    assert texts == {key: answer(*key) for key in texts}
    assert len({tuple(text[:4]) for text in texts.values()}) == len(texts), "two answers begin alike"
    assert [len(text) for text in texts.values()] == [answer_tokens(*key) for key in texts]


def test_lengths_are_spread_like_those_of_chats() -> None:
    lengths = sorted(answer_tokens(seed, 0) for seed in range(2000))
    median, longest = lengths[1000], lengths[1980]
    assert 110 < median < 150, "128, give or take three standard errors of a median of 2,000"
    assert 600 < longest < 1200


def test_ends_are_kept_where_the_request_wants_none_or_not_yet() -> None:
    assert len(answer(3, ends=())) == 4000
    least = answer_tokens(3, 0) + 50
    assert len(answer(3, least=least)) == least + 1
    some = tuple(range(16, 3000))
    assert all(token >= 3000 for token in (token_at(sampling(ends=some), 0, i, VOCABULARY) for i in range(9)))


def test_steps_take_what_the_cost_model_says_and_a_fast_clock_makes_them_short() -> None:
    for speed in (1.0, 10.0):
        engine, slept = make(speed)
        point = SamplePoint(sampling(), 0, 0, list(range(20, 30)))
        engine.step([Row(list(range(20, 30)), 0, [3, 1, 2], point)])
        engine.step([Row([99], 10, [3, 1, 2], SamplePoint(sampling(), 0, 1, [*range(20, 30), 99]))])
        costs = [COST.step_s([(0, 10)], 0, 0), COST.step_s([], 1, 11)]
        assert slept == pytest.approx([cost / speed for cost in costs])


def test_blocks_that_hold_something_else_are_found_with_the_first_token_and_each_full_block() -> None:
    engine, _ = make()
    prompt = list(range(20, 32))
    engine.step([Row(prompt[:8], 0, [5, 6], None)])
    last = Row(prompt[8:], 8, [5, 6, 7], SamplePoint(sampling(), 0, 0, prompt))
    assert engine.step([last]) == engine.step([last]), "again is harmless"
    engine.step([Row([1, 2, 3, 4], 0, [6], None)])
    with pytest.raises(InternalError, match="other tokens"):
        engine.step([last])
    tokens = list(range(20, 30))
    engine.step([Row(tokens, 0, [5, 6, 7], SamplePoint(sampling(), 0, 0, tokens))])
    engine.tokens[5, 2] += 1
    tokens.append(40)
    engine.step([Row([40], 10, [5, 6, 7], SamplePoint(sampling(), 0, 1, tokens))])
    tokens.append(41)  # fills a block
    with pytest.raises(InternalError, match="other tokens"):
        engine.step([Row([41], 11, [5, 6, 7], SamplePoint(sampling(), 0, 2, tokens))])


def test_records_of_blocks_are_their_tokens() -> None:
    engine, _ = make()
    engine.step([Row(list(range(20, 28)), 0, [5, 6], None)])
    records = Records(engine.pools)
    rows = [np.zeros(records.record_bytes, dtype=np.uint8) for _ in range(2)]
    records.read([5, 6], rows)
    assert [row.view(np.int32).tolist() for row in rows] == [[20, 21, 22, 23], [24, 25, 26, 27]]
    records.write(rows, [8, 9])
    rest = Row([40], 8, [8, 9, 10], SamplePoint(sampling(), 0, 0, [*range(20, 28), 40]))
    assert engine.step([rest])[0] is not None, "brought elsewhere they serve as well"


def test_its_sizes_are_the_models() -> None:
    engine = SimulatedEngine.of("models/tiny_chat", 8, 16, SimulatedConfig(speed=2.0))
    assert (engine.vocabulary, engine.max_positions, engine.kv_blocks) == (4096, 4096, 8)
    other = SimulatedEngine.of("models/tiny_chat", 8, 4, SimulatedConfig())
    assert other.fingerprint != engine.fingerprint, "blocks of another size are not exchanged"
    with pytest.raises(ConfigError, match="no folder"):
        SimulatedEngine.of("somebody/something", 8, 16, SimulatedConfig())


def test_it_borrows_where_it_is_told_to() -> None:
    """Who borrows hears every other worker's heartbeats, which a large fleet has no time for."""
    kept = {
        borrow: load(WorkerConfig, "worker", argv=["--engine=simulated", *borrow]).lending.borrow
        for borrow in ((), ("--lending.borrow=true",), ("--lending.borrow=auto",), ("--lending.lease-s=3",))
    }
    assert list(kept.values()) == [False, True, "auto", False]


def test_a_worker_of_it_imports_no_torch() -> None:
    code = (
        "import sys; import services.worker.service, services.worker.engine.simulated;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
