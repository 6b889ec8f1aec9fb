"""Old against new: only what is better on the latest answers is kept."""

from pathlib import Path

import pytest

from services.predictor.core.report import evaluate, held_out_of
from services.predictor.models import versions
from services.predictor.models.constant import ConstantModel
from services.predictor.models.training import TrainingPlan
from services.predictor.trial import Verdict, hold_trial
from shared.errors import InvalidRequest
from tests.services.predictor.lengths import samples_of

PLAN = TrainingPlan(members=1, epochs=4, min_steps=60)


def trial(directory: Path, count: int = 400, seed: int = 0) -> Verdict:
    return hold_trial(samples_of(count, seed), directory, PLAN, held_out=100, only_if_better=True)


def test_the_first_one_beats_the_histogram_and_is_written(tmp_path: Path) -> None:
    verdict = trial(tmp_path)
    assert verdict.old is not None and verdict.new is not None and verdict.path is not None
    assert verdict.old_version.startswith("histogram") and verdict.is_better
    assert verdict.new.mae_tokens < 0.5 * verdict.old.mae_tokens
    written = versions.latest(tmp_path)
    assert written is not None and written.version == "regressor-1"
    assert written.report["held_out"]["mae_tokens"] == round(verdict.new.mae_tokens, 3)


def test_one_that_is_worse_is_not_written(tmp_path: Path) -> None:
    trial(tmp_path)
    samples = samples_of(400)
    opposite = [
        type(sample)(sample.prompt, 220 - min(sample.output_tokens, 219), sample.censored)
        for sample in samples[:300]
    ]
    verdict = hold_trial([*opposite, *samples[300:]], tmp_path, PLAN, held_out=100, only_if_better=True)
    assert verdict.old_version == "regressor-1" and not verdict.is_better and verdict.path is None
    assert [path.name for path in versions.paths(tmp_path)] == ["regressor-000001.safetensors"]


def test_too_few_and_stopped_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="at least 50"):
        trial(tmp_path, 120)
    with pytest.raises(TimeoutError):
        hold_trial(
            samples_of(400), tmp_path, PLAN, held_out=100, only_if_better=True, should_stop=lambda: True
        )
    assert versions.paths(tmp_path) == []


def test_answers_cut_by_their_limit_do_not_judge() -> None:
    samples = [type(sample)(sample.prompt, 5, censored=True) for sample in samples_of(10)]
    assert evaluate(ConstantModel(), samples) is None
    report = evaluate(ConstantModel(30), [*samples, *samples_of(2, noise=0.0)])
    assert report is not None and (report.scored, report.mae_tokens) == (2, 90.0)


@pytest.mark.parametrize(("samples", "judge"), [(30, 10), (100, 20), (3000, 300), (50_000, 1000)])
def test_a_tenth_judges_within_bounds(samples: int, judge: int) -> None:
    assert held_out_of(samples) == judge
