"""The oracle: what the trace says, or what it saw itself.

The constant model.
"""

import json
from pathlib import Path

import pytest

from services.predictor.core.length_model import LengthSample, ModelSettings
from services.predictor.models import ConstantModel, create
from services.predictor.models.oracle import OracleModel
from shared.errors import ConfigError
from shared.messages.sequence import pack_tokens

A, B = pack_tokens([1, 2, 3]), pack_tokens([1, 2, 4])


def test_a_trace_is_told_and_a_stranger_is_guessed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"prompt_ids": [1, 2, 3], "length": 77}) + "\n")
    model = create("oracle", ModelSettings(trace=trace))
    assert model.predict(A, max_tokens=1000).rl_tokens == 77
    assert model.predict(A, max_tokens=1000).p95_tokens == 77
    assert model.predict(A, max_tokens=50).rl_tokens == 50
    assert model.predict(A, max_tokens=1000, generated_tokens=80).rl_tokens == 81
    assert model.predict(B, max_tokens=1000).p50_tokens != 77
    with pytest.raises(ConfigError):
        create("oracle", ModelSettings(trace=tmp_path / "none.jsonl"))


def test_several_lengths_of_a_prompt_are_told_in_turn() -> None:
    model = OracleModel([LengthSample(A, length, censored=False) for length in (5, 9)])
    assert [model.predict(A, max_tokens=100).rl_tokens for _ in range(3)] == [5, 9, 5]
    assert model.predict(A, max_tokens=100, generated_tokens=3).rl_tokens == 5, "about the same answer"


def test_what_it_saw_end_it_knows_the_next_time() -> None:
    model = OracleModel()
    model.observe(LengthSample(A, 30, censored=True))
    assert model.version == "oracle-0"
    model.observe(LengthSample(A, 30, censored=False))
    model.observe(LengthSample(A, 31, censored=False))
    assert model.version == "oracle-2"
    assert model.predict(A, max_tokens=100).rl_tokens == 31


def test_says_the_same_within_what_is_possible() -> None:
    model = ConstantModel(128)
    model.observe(LengthSample(b"", 5, censored=False))
    assert model.predict(b"", max_tokens=500).p95_tokens == 128
    assert model.predict(b"", max_tokens=100).rl_tokens == 100
    assert model.predict(b"", max_tokens=500, generated_tokens=300).rl_tokens == 301


def test_models_are_found_by_name() -> None:
    assert create("constant").name == "constant"
    assert create("histogram").name == "histogram"
