"""On a CUDA device, in an environment with vLLM for it: both model runners, with compiled kernels."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.stack.running import ROOT
from tests.vllm.models import make

_DEADLINE_S = 280.0


@pytest.mark.gpu
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_answers_are_those_of_vllm_alone(tmp_path: Path, runner: str) -> None:
    """Rows and blocks in any order, steps that break off, KV as it lies there."""
    python = os.environ.get("KVASIR_STACK__VLLM_PYTHON")
    if python is None:
        pytest.skip("name a Python that has vLLM for CUDA: KVASIR_STACK__VLLM_PYTHON")
    make("qwen2", tmp_path / "qwen2")
    argv = [python, "-m", "tests.vllm.generate", str(tmp_path / "qwen2"), "1", runner, "cuda"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["engine"] == found["again"] == found["vllm"]
    assert found["in_flight"] == found["alone"]
