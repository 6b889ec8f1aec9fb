"""`train` and `evaluate` as a person runs them.

Old against new: only what is better on the latest answers is kept.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.predictor.command import main
from services.predictor.core.report import evaluate, held_out_of
from services.predictor.models import ConstantModel, versions
from services.predictor.models.training import TrainingPlan
from services.predictor.samples import write_samples
from services.predictor.trial import Verdict, hold_trial
from shared.errors import InvalidRequest
from tests.services.predictor.lengths import samples_of

ROOT = Path(__file__).parents[3]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    write_samples(path, samples_of(300))
    return path


def test_train_writes_a_version_that_evaluate_reads(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "versions"
    assert main(["train", "--data", str(data), "--out", str(out), "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["written"] == "regressor-000001.safetensors"
    assert verdict["new"]["mae_tokens"] < verdict["old"]["mae_tokens"]
    assert main(["evaluate", "--data", str(data), "--state-dir", str(out), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["version"] == "regressor-1" and figures["scored"] == 300
    assert main(["evaluate", "--model", "histogram", "--data", str(data)]) == 0
    assert "mae_tokens" in capsys.readouterr().out


def test_the_table_says_what_was_compared(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "--data", str(data), "--out", str(tmp_path / "v"), "--held-out", "60"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "histogram" in shown and "within_50_share" in shown and "regressor-000001" in shown


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--data", "none.jsonl"], "none.jsonl"),
        (["--held-out", "300"], "held-out"),
        (["--held-out", "270"], "at least 50"),
        (["--deadline-s", "0"], "stopped"),
    ],
)
def test_what_cannot_be_done_is_told(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert main(["train", "--data", str(data), "--out", str(tmp_path / "v"), *arguments]) == 1
    assert told in capsys.readouterr().err


def test_in_the_background_it_ends_with_whoever_asked(data: Path, tmp_path: Path) -> None:
    stranger = str(os.getpid() + 1_000_000)
    command = [sys.executable, "-m", "services.predictor", "train", "--data", str(data)]
    command += ["--out", str(tmp_path / "v"), "--background", stranger]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1 and "stopped" in done.stderr
    assert versions.paths(tmp_path / "v") == []


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
