"""Length models by name; the regressor and its training."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.predictor.core.distribution import LEVELS
from services.predictor.core.features import features_of
from services.predictor.core.length_model import LengthQuery, LengthSample, ModelSettings
from services.predictor.core.report import evaluate
from services.predictor.models import ConstantModel, create, model_names, regressor
from services.predictor.models.oracle import OracleModel
from services.predictor.models.regressor import Ensemble, RegressorModel, Trained, lengths_of
from services.predictor.models.training import TrainingPlan, train
from shared.errors import ConfigError, InvalidRequest
from shared.messages.sequence import pack_tokens
from tests.installed import install
from tests.services.predictor.lengths import LONG_TOKENS, SHORT_TOKENS, samples_of

PACKAGE = """
from services.predictor.models import ConstantModel

def fives(settings):
    return ConstantModel(5)
"""
A, B = pack_tokens([1, 2, 3]), pack_tokens([1, 2, 4])


def test_a_package_adds_a_model_but_replaces_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"fives": "fives", "constant": "fives", "broken": "missing"}
    install(tmp_path, monkeypatch, "kvasir_fives", PACKAGE, "kvasir.predictor.models", points)
    assert "fives" in model_names() and create("fives").predict(b"", max_tokens=100).p50_tokens == 5
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
    assert model.version == "oracle-2" and model.predict(A, max_tokens=100).rl_tokens == 31


def test_the_constant_stays_within_the_limits() -> None:
    model = ConstantModel(128)
    assert model.predict(b"", max_tokens=500).p95_tokens == 128
    assert model.predict(b"", max_tokens=100).rl_tokens == 100
    assert model.predict(b"", max_tokens=500, generated_tokens=300).rl_tokens == 301


def ensemble(seed: int = 3, members: int = 1) -> Ensemble:
    torch.manual_seed(seed)
    return Ensemble(members).eval()


def test_without_a_version_the_histogram_answers_and_learns() -> None:
    model = RegressorModel()
    for sample in samples_of(100):
        model.observe(sample)
    assert model.version == "histogram-100"
    assert 10 <= model.predict(samples_of(1)[0].prompt, max_tokens=1000).p50_tokens <= 300


def test_a_version_is_adopted_between_two_calls_and_answers_alone_as_in_a_batch() -> None:
    model = RegressorModel()
    queries = [LengthQuery(sample.prompt, 500) for sample in samples_of(5)]
    before = model.predict_batch(queries)
    model.adopt(Trained(ensemble(), 3, {}))
    after = model.predict_batch(queries)
    assert model.version == "regressor-3" and after != before
    assert after == [model.predict(query.prompt, max_tokens=500) for query in queries]
    assert model.predict_batch([]) == []


def test_quantiles_ascend_are_corrected_in_logarithms_and_do_not_depend_on_the_batch() -> None:
    made = ensemble(members=2)
    prompts = [pack_tokens(range(start, start + 9)) for start in range(5)]
    together = lengths_of(made, features_of(prompts))
    assert together.shape == (5, len(LEVELS))
    assert (np.diff(together, axis=1) >= 0).all() and (together >= 1).all()
    alone = np.concatenate([lengths_of(made, features_of([prompt])) for prompt in prompts])
    assert np.allclose(together, alone, rtol=1e-4)
    made.correction.fill_(float(np.log(2.0)))
    assert np.allclose(lengths_of(made, features_of(prompts)), 2 * together, rtol=1e-4)


def test_a_version_is_read_as_it_was_written_and_a_restart_takes_the_latest(tmp_path: Path) -> None:
    assert create("regressor", ModelSettings(state_dir=tmp_path / "new")).version == "histogram-0"
    made = ensemble()
    read = regressor.read(regressor.write(tmp_path / "new", made, {"samples": 7}))
    assert (read.number, read.version, read.report) == (1, "regressor-1", {"samples": 7})
    for name, tensor in made.state_dict().items():
        assert bool((read.network.state_dict()[name] == tensor).all())
    for _ in range(3):
        regressor.write(tmp_path / "new", made, {}, keep=2)
    (tmp_path / "new" / "served.jsonl").write_text("")
    assert [regressor.number_of(path) for path in regressor.paths(tmp_path / "new")] == [3, 4]
    assert create("regressor", ModelSettings(state_dir=tmp_path / "new")).version == "regressor-4"


def test_a_damaged_or_foreign_version_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    regressor.write(tmp_path, ensemble(), {})
    newest = regressor.write(tmp_path, ensemble(4), {})
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="regressor-000002"):
        regressor.read(newest)
    found = regressor.latest(tmp_path)
    assert found is not None and found.number == 1
    monkeypatch.setattr(regressor, "_LAYOUT", "another")
    path = regressor.write(tmp_path, ensemble(), {})
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="another release"):
        regressor.read(path)


PLAN = TrainingPlan(members=2, epochs=5, min_steps=100)


def test_a_word_that_decides_is_found_and_quantiles_hold() -> None:
    seen: list[tuple[int, int]] = []
    network = train(
        samples_of(600, noise=0.3), PLAN, progress=lambda done, total, mae: seen.append((done, total))
    )
    model = RegressorModel(Trained(network, 1, {}))
    report = evaluate(model, samples_of(600, seed=1, noise=0.3))
    assert report is not None
    spread = np.mean([0.3 * SHORT_TOKENS, 0.3 * LONG_TOKENS]) * 0.8
    assert report.mae_tokens < 1.4 * spread and 0.35 < report.below_p50_share < 0.65
    assert 0.84 < report.below_p90_share < 0.97
    epochs = PLAN.epochs_for(600)
    assert seen == [(done, 2 * epochs) for done in range(1, 2 * epochs + 1)]


def test_equal_seeds_make_equal_networks() -> None:
    first, second = (train(samples_of(100), TrainingPlan(members=1, min_steps=10)) for _ in range(2))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert bool((one == other).all())


def test_answers_cut_by_their_limit_pull_up_and_never_down() -> None:
    long = [sample for sample in samples_of(600) if sample.output_tokens > 100]
    half = [LengthSample(s.prompt, 50, censored=True) if n % 2 else s for n, s in enumerate(long)]
    model = RegressorModel(Trained(train(half, PLAN), 1, {}))
    told = model.predict_batch([LengthQuery(sample.prompt, 1000) for sample in long])
    median = float(np.median([one.p50_tokens for one in told]))
    assert median > 0.8 * LONG_TOKENS, "taken for lengths they would have halved it"


def test_too_few_samples_and_a_stop_are_errors() -> None:
    with pytest.raises(InvalidRequest):
        train(samples_of(49))
    with pytest.raises(TimeoutError):
        train(samples_of(60), should_stop=lambda: True)


def test_members_done_before_a_stop_are_used() -> None:
    done: list[int] = []
    plan = TrainingPlan(members=3, epochs=2, min_steps=1)
    enough: dict[str, Any] = {
        "progress": lambda epoch, total, mae: done.append(epoch),
        "should_stop": lambda: len(done) >= 2,
    }
    network = train(samples_of(60), plan, **enough)
    assert len(network.members) == 1
