"""Other examples are drawn in every run, and a run that fails says how to draw its own again."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_examples_differ_from_run_to_run_where_hypothesis_sees_ci() -> None:
    """A bound that only some examples break was not seen there: they were the same every time."""
    script = (
        "import tests.conftest; from hypothesis import settings as s; print(s().derandomize, s().print_blob)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"CI": "true"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["False", "True"]


def test_a_failure_says_its_seed(tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "make $*"\ntest "$1" = check\n')
    make.chmod(0o755)
    said = []
    for number in (1, 2):
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SEED": str(number)}
        done = subprocess.run(
            [ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode != 0
        assert done.stdout.splitlines() == ["make check", f"make test ARGS=--hypothesis-seed={number}"]
        said.append(done.stderr.strip())
    assert said == [
        f"failed with this seed; again: make test ARGS=--hypothesis-seed={each}" for each in (1, 2)
    ]
