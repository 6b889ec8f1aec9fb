"""The engine bench as a command: what it plans and refuses, and short runs against peers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import cli
from bench.kit.peers import VLLM_VARIANTS
from bench.kit.provenance import ROOT
from bench.live.engine import variants
from bench.live.engine.variants import DEFAULT, chosen
from shared.errors import ConfigError

SHORT = [
    "--batches",
    "1,2",
    "--contexts",
    "20",
    "--output-tokens",
    "4",
    "--alternations",
    "2",
    "--kv-gib",
    "1",
]


def engine(run_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: a bench binds itself to a core."""
    argv = [sys.executable, "-m", "bench", "engine", *SHORT, "--out", str(run_dir), *words]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)


def result(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "result.json").read_text()))


def test_against_transformers_and_on_with_it(tmp_path: Path) -> None:
    """Engines called directly; a second run goes on, and no other workload mixes in."""
    first = engine(tmp_path, "--peer", "transformers", "--budget-s", "0.0001")
    assert first.returncode == 0, first.stderr
    assert result(tmp_path)["incomplete"] > 0
    again = engine(tmp_path, "--peer", "transformers", "--resume", "--output-tokens", "5")
    assert again.returncode == 2
    assert "another workload" in again.stderr
    done = engine(tmp_path, "--peer", "transformers", "--resume")
    assert done.returncode == 0, done.stderr
    made = result(tmp_path)
    assert (made["incomplete"], made["failures"], made["peer"]) == (0, 0, {"name": "transformers"})
    assert {"tok_s_ratio_b1", "tok_s_ratio_b2", "tok_s_ratio_b2_ctx20_worst"} <= set(made["figures"])
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")
    over = engine(tmp_path, "--peer", "transformers")
    assert over.returncode == 2
    assert "--resume" in over.stderr


def test_a_peer_that_is_not_set_up_says_how_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.live.engine.llamacpp._VENV", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    from bench.live.engine.llamacpp import gguf, llamacpp_binary

    with pytest.raises(ConfigError, match="make setup-llamacpp"):
        llamacpp_binary()
    monkeypatch.setattr("bench.live.engine.llamacpp.CACHE", tmp_path)
    with pytest.raises(ConfigError, match="make setup-llamacpp"):
        gguf(tmp_path / "model")


@pytest.mark.parametrize("wrong", ["0", "1,x", ""])
def test_wrong_numbers_are_refused(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["engine", "--out", str(tmp_path), "--batches", wrong])


def test_the_fastest_way_of_running_vllm_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "CACHE", tmp_path)
    model = Path("some/model")
    assert chosen(model) == (DEFAULT, False)
    for variant in VLLM_VARIANTS:
        (tmp_path / "vllm-model.json").write_text(json.dumps({"variant": variant.name}))
        assert chosen(model) == (variant, True)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not (ROOT / ".venv-vllm" / ".installed").exists(), reason="make setup-vllm")
def test_against_vllm(tmp_path: Path) -> None:
    done = engine(tmp_path, "--peer", "vllm", "--vllm", "eager-uni")
    assert done.returncode == 0, done.stderr
    made = result(tmp_path)
    assert (made["incomplete"], made["failures"]) == (0, 0)
    assert made["figures"]["tok_s_b2_ctx20_vllm"] > 0
    assert made["figures"]["client_share_max"] < 0.5
