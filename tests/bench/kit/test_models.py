"""Random checkpoints are real ones: our loader and the tokenizer take them."""

import json
from pathlib import Path

import pytest

from bench.kit import models as module
from bench.kit.models import TINY_CHAT, checkpoint, vocabulary
from bench.kit.peers import vllm_binary
from shared.errors import ConfigError

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def test_a_random_checkpoint_is_made_once_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.RANDOM_SHAPES, "random-small", SMALL)
    folder = checkpoint("random-small", tmp_path)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert checkpoint("random-small", tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert vocabulary(folder) == vocabulary(TINY_CHAT)
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 32

    from services.worker.engine.loading import load

    assert load(str(folder), dtype="float32", device="cpu").vocabulary == vocabulary(folder)


def test_a_peer_that_is_not_set_up_says_how_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.kit.peers.ROOT", tmp_path)
    with pytest.raises(ConfigError, match="make setup-vllm"):
        vllm_binary()


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    assert checkpoint(str(TINY_CHAT), tmp_path) == TINY_CHAT
    with pytest.raises(ConfigError, match="random-100m"):
        checkpoint(str(tmp_path), tmp_path)
