"""vLLM's load generator against a real gateway: no failures."""

import json
from pathlib import Path

import pytest

from bench import cli
from bench.kit.provenance import ROOT


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not (ROOT / ".venv-vllm" / ".installed").exists(), reason="make setup-vllm")
def test_no_request_fails(tmp_path: Path) -> None:
    assert cli.main(["vllm-client", "--quick", "--requests", "20", "--out", str(tmp_path)]) == 0
    made = json.loads((tmp_path / "result.json").read_text())
    assert made["failures"] == 0
    assert made["figures"]["completed"] == 20
