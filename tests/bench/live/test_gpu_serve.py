"""Whole servers side by side on one device: the command on a CPU, and the figures of given rows."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.kit.models import TINY_CHAT
from bench.kit.provenance import ROOT
from bench.live.gpu_serve import figures

VLLM = ROOT / ".venv-vllm"


def row(side: str, streams: int, tok_s: float, ttft_ms: float, busy: float = 0.0) -> dict[str, Any]:
    told = {"side": side, "streams": streams, "tok_s": tok_s, "ttft_ms": ttft_ms, "client_share": 0.5}
    return told | {"kernel_share": busy, "busy_share": busy}


def test_ratios_are_ours_over_theirs_and_what_is_unknown_is_left_out() -> None:
    ours = [row("kvasir", 1, 50.0, 4.0), row("kvasir", 128, 900.0, 30.0, busy=0.75)]
    made = figures([*ours, row("vllm", 128, 1200.0, 20.0, busy=0.9), row("vllm", 1, 0.0, 0.0)])
    assert made["served_ratio_b128"] == 0.75 and made["ttft_ratio_b128"] == 1.5
    assert made["device_busy_share"] == 0.75 and made["busy_share_b128_vllm"] == 0.9
    assert not {"served_ratio_b1", "ttft_ratio_b1", "tok_s_b1_vllm", "busy_share_b1_kvasir"} & set(made)
    assert "device_busy_share" not in figures(ours[:1])


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.skipif(not (VLLM / ".installed").exists(), reason="make setup-vllm")
def test_both_sides_serve_one_after_the_other(tmp_path: Path) -> None:
    """vLLM as on a machine without a network: its packages on the path of our own Python."""
    (site,) = VLLM.glob("lib/python3*/site-packages")
    argv = [sys.executable, "-m", "bench", "gpu", "--serve", "--device", "cpu", "--quick"]
    argv += ["--model", str(TINY_CHAT), "--out", str(tmp_path), "--streams", "1", "128", "--budget-s", "850"]
    env = {**os.environ, "KVASIR_VLLM_PATH": str(site)}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=950, check=False)
    assert done.returncode == 0, done.stderr
    made = json.loads((tmp_path / "result.json").read_text())
    wanted = {"served_ratio_b1", "served_ratio_b128", "ttft_ratio_b1", "ttft_ratio_b128"}
    assert wanted <= set(made["figures"]) and made["failures"] == 0, made["notes"]
