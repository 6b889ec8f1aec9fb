"""Length models by name, and the simple ones: constant and oracle."""

import json
from pathlib import Path

import pytest

from services.predictor.core.length_model import LengthSample, ModelSettings
from services.predictor.models import ConstantModel, create, model_names
from services.predictor.models.oracle import OracleModel
from shared.errors import ConfigError
from shared.messages.sequence import pack_tokens
from tests.installed import install

PACKAGE = """
from services.predictor.models import ConstantModel

def fives(settings):
    return ConstantModel(5)
"""
A, B = pack_tokens([1, 2, 3]), pack_tokens([1, 2, 4])


def test_an_installed_package_adds_a_model_but_replaces_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {"fives": "fives", "constant": "fives", "broken": "missing"}
    install(tmp_path, monkeypatch, "kvasir_fives", PACKAGE, "kvasir.predictor.models", points)
    assert "fives" in model_names()
    assert create("fives").predict(b"", max_tokens=100).p50_tokens == 5
    constant = create("constant")
    assert isinstance(constant, ConstantModel) and constant.length_tokens == 128
    with pytest.raises(ConfigError, match="kvasir_fives:missing"):
        create("broken")
    with pytest.raises(ConfigError, match=r"constant, fives, histogram, lm_head, oracle, regressor") as error:
        create("regresor")
    assert error.value.param == "model"


def test_the_oracle_returns_the_length_of_the_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"prompt_ids": [1, 2, 3], "length": 77}) + "\n")
    model = create("oracle", ModelSettings(trace=trace))
    assert model.predict(A, max_tokens=1000).rl_tokens == 77
    assert model.predict(A, max_tokens=50).rl_tokens == 50
    assert model.predict(A, max_tokens=1000, generated_tokens=80).rl_tokens == 81
    assert model.predict(B, max_tokens=1000).p50_tokens != 77
    with pytest.raises(ConfigError):
        create("oracle", ModelSettings(trace=tmp_path / "none.jsonl"))


def test_the_oracle_returns_several_lengths_of_a_prompt_in_turn() -> None:
    model = OracleModel([LengthSample(A, length, censored=False) for length in (5, 9)])
    assert [model.predict(A, max_tokens=100).rl_tokens for _ in range(3)] == [5, 9, 5]
    assert model.predict(A, max_tokens=100, generated_tokens=3).rl_tokens == 5, "about the same answer"


def test_the_oracle_remembers_finished_answers() -> None:
    model = OracleModel()
    model.observe(LengthSample(A, 30, censored=True))
    assert model.version == "oracle-0"
    for tokens in (30, 31):
        model.observe(LengthSample(A, tokens, censored=False))
    assert model.version == "oracle-2"
    assert model.predict(A, max_tokens=100).rl_tokens == 31


def test_the_constant_stays_within_the_limits() -> None:
    model = ConstantModel(128)
    assert model.predict(b"", max_tokens=500).p95_tokens == 128
    assert model.predict(b"", max_tokens=100).rl_tokens == 100
    assert model.predict(b"", max_tokens=500, generated_tokens=300).rl_tokens == 301
