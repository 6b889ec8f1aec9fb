"""Training finds what decides the length, and calibrates."""

import numpy as np
import pytest

from services.predictor.core.length_model import LengthQuery, LengthSample
from services.predictor.core.report import evaluate
from services.predictor.models.network import Trained
from services.predictor.models.regressor import RegressorModel
from services.predictor.models.training import TrainingPlan, train
from shared.errors import InvalidRequest
from tests.services.predictor.lengths import LONG_TOKENS, SHORT_TOKENS, samples_of

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
    assert report.mae_tokens < 1.4 * spread
    assert 0.35 < report.below_p50_share < 0.65
    assert 0.84 < report.below_p90_share < 0.97
    epochs = PLAN.epochs_for(600)
    assert seen == [(done, 2 * epochs) for done in range(1, 2 * epochs + 1)]


def test_equal_seeds_make_equal_networks() -> None:
    first, second = (train(samples_of(100), TrainingPlan(members=1, min_steps=10)) for _ in range(2))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert bool((one == other).all())


def test_answers_cut_by_their_limit_pull_up_and_never_down() -> None:
    long = [sample for sample in samples_of(600) if sample.output_tokens > 100]
    half = [
        LengthSample(sample.prompt, 50, censored=True) if number % 2 else sample
        for number, sample in enumerate(long)
    ]
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
    network = train(
        samples_of(60),
        plan,
        progress=lambda epoch, total, mae: done.append(epoch),
        should_stop=lambda: len(done) >= 2,
    )
    assert len(network.members) == 1
