"""Architectures of many kinds, small, random weights: greedy answers are vLLM's own, token for token."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.stack.running import ROOT
from tests.vllm.conftest import PYTHON
from tests.vllm.models import MAKERS, make

_DEADLINE_S = 280.0
"""Two starts of vLLM."""


@pytest.mark.parametrize("name, ranks", [*((name, 1) for name in MAKERS), ("qwen2", 2)])
def test_answers_are_those_of_vllm_alone(tmp_path: Path, name: str, ranks: int) -> None:
    make(name, tmp_path / name)
    argv = [str(PYTHON), "-m", "tests.vllm.generate", str(tmp_path / name), str(ranks)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["engine"] == found["vllm"]
    assert len({tuple(answer) for answer in found["vllm"]}) == len(found["vllm"])
