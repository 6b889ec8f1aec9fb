"""`train` and `evaluate` as a person runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.predictor.command import main
from services.predictor.models import versions
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
