"""Architectures of many kinds, small, random weights: greedy answers are vLLM's own, token for token."""

import json
import subprocess
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.stack.running import ROOT
from tests.tasks import ran
from tests.vllm.conftest import PYTHON
from tests.vllm.models import MAKERS, PACKINGS, make, pack

_DEADLINE_S = 280.0
"""Two starts of vLLM."""


def generated(folder: Path, *words: str) -> dict[str, Any]:
    """What `tests.vllm.generate` prints."""
    interpreter = ("-m", "tests.vllm.interpreted") if "v2" in words else ("-m",)
    argv = [str(PYTHON), *interpreter, "tests.vllm.generate", str(folder), *words]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


@pytest.mark.parametrize("name, ranks", [*((name, 1) for name in MAKERS), ("qwen2", 2)])
def test_answers_are_those_of_vllm_alone(tmp_path: Path, name: str, ranks: int) -> None:
    make(name, tmp_path / name)
    dtype = "bfloat16" if name in ("mixtral", "gpt_oss") else "float32"  # some versions fail in 32 bits
    found = generated(tmp_path / name, str(ranks), "v1", "cpu", dtype)
    assert found["engine"] == found["vllm"]
    assert ranks > 1 or (found["again"], found["in_flight"]) == (found["vllm"], found["alone"])
    assert len({tuple(answer) for answer in found["vllm"]}) == len(found["vllm"])


@pytest.mark.parametrize("kind", [kind for kind in PACKINGS if kind != "fp8"])
def test_answers_of_quantised_checkpoints_are_those_of_vllm_alone(tmp_path: Path, kind: str) -> None:
    make("qwen2", tmp_path / kind)
    pack(tmp_path / kind, kind)
    found = generated(tmp_path / kind, "1", "v1", "cpu", "bfloat16")
    assert found["engine"] == found["again"] == found["vllm"]
    assert len({tuple(answer) for answer in found["vllm"]}) == len(found["vllm"])


def test_weights_in_fp8_are_refused_on_a_cpu(tmp_path: Path) -> None:
    """The wheel for CPUs lacks an operation that their loading needs."""
    make("qwen2", tmp_path / "fp8")
    pack(tmp_path / "fp8", "fp8")
    words = ("-m", "tests.vllm.generate", str(tmp_path / "fp8"), "1", "v1", "cpu", "bfloat16")
    done = ran([PYTHON, *words])
    assert done.returncode != 0 and f"ConfigError: vLLM cannot serve {tmp_path / 'fp8'}: " in done.stderr


@pytest.mark.timeout(2 * _DEADLINE_S + 60)
@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_model_runner_v2_answers_as_vllm_does_alone(tmp_path: Path, name: str) -> None:
    """All of V2 but compiled kernels: Triton interprets them."""
    make(name, tmp_path / name)
    v1, v2 = generated(tmp_path / name), generated(tmp_path / name, "1", "v2")
    assert v2["engine"] == v2["again"] == v1["vllm"]
    assert v2["in_flight"] == v2["alone"] == v1["alone"]
    for one, other in zip(v1["embedded"], v2["embedded"], strict=True):
        vectors = [np.frombuffer(b64decode(each), dtype="<f4") for each in (one, other)]
        np.testing.assert_allclose(vectors[0], vectors[1], rtol=1e-4, atol=1e-4)


def test_an_unknown_version_is_tried_and_a_missing_name_is_in_the_refusal() -> None:
    """The number alone brings a warning; this version's names are all there, until one is taken away."""
    code = (
        "import vllm; own, vllm.__version__ = vllm.__version__, '99.1'\n"
        "from services.worker.engine.vllm.versions import check_names, check_version, installed, part\n"
        "check_version(); installed.cache_clear(); vllm.__version__ = own\n"
        "check_names('v1'); print('all there')\n"
        "del part('SchedulerOutput').__dataclass_fields__['finished_req_ids']; check_names('v1')"
    )
    done = ran([PYTHON, "-c", code])
    assert done.stdout.splitlines()[-1] == "all there" and "vLLM 99.1 is tried" in done.stderr
    assert "not as Kvasir knows it: no SchedulerOutput.finished_req_ids" in done.stderr


def test_model_runner_v2_without_triton_is_refused() -> None:
    """Before a model is loaded: the wheel for CPUs comes with a Triton for GPUs alone."""
    code = "from services.worker.engine.vllm.steps_v2 import check_v2; check_v2()"
    done = ran([PYTHON, "-c", code])
    assert done.returncode != 0 and "set vllm.model_runner v1" in done.stderr
