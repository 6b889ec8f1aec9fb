"""`train` and `evaluate`: a new version is kept only if it is better on the latest answers."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from services.predictor.command import main
from services.predictor.core.report import evaluate
from services.predictor.models import ConstantModel, network
from services.predictor.models.training import TrainingPlan, hold_trial
from services.predictor.samples import write_samples
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
    assert main(["train", "--data", str(data), "--out", str(out), "--held-out", "60"]) == 0
    shown = capsys.readouterr().out
    assert "histogram" in shown and "within_50_share" in shown and "regressor-000001" in shown
    assert main(["evaluate", "--data", str(data), "--state-dir", str(out), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["version"] == "regressor-1" and figures["scored"] == 300
    assert main(["evaluate", "--model", "histogram", "--data", str(data)]) == 0
    assert "mae_tokens" in capsys.readouterr().out


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
    assert network.paths(tmp_path / "v") == []


PLAN = TrainingPlan(members=1, epochs=4, min_steps=60)


def test_only_a_version_that_beats_the_old_one_is_written(tmp_path: Path) -> None:
    samples = samples_of(400)
    first = hold_trial(samples, tmp_path, PLAN, held_out=100, only_if_better=True)
    assert first.old is not None and first.new is not None and first.path is not None
    assert first.old_version.startswith("histogram") and first.is_better
    assert first.new.mae_tokens < 0.5 * first.old.mae_tokens
    written = network.latest(tmp_path)
    assert written is not None and written.version == "regressor-1"
    assert written.report["held_out"]["mae_tokens"] == round(first.new.mae_tokens, 3)
    opposite = [replace(one, output_tokens=220 - min(one.output_tokens, 219)) for one in samples[:300]]
    worse = hold_trial([*opposite, *samples[300:]], tmp_path, PLAN, held_out=100, only_if_better=True)
    assert worse.old_version == "regressor-1" and not worse.is_better and worse.path is None
    assert [path.name for path in network.paths(tmp_path)] == ["regressor-000001.safetensors"]


def test_answers_cut_by_their_limit_are_not_compared() -> None:
    samples = [replace(sample, output_tokens=5, censored=True) for sample in samples_of(10)]
    assert evaluate(ConstantModel(), samples) is None
    report = evaluate(ConstantModel(30), [*samples, *samples_of(2, noise=0.0)])
    assert report is not None and (report.scored, report.mae_tokens) == (2, 90.0)
