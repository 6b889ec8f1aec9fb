"""The servers we are compared with: what is said where one is not set up, and how each may run."""

from pathlib import Path

import pytest

from bench.kit.peers import VLLM_VARIANTS, vllm_binary
from shared.errors import ConfigError


def test_a_peer_that_is_not_set_up_says_how_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.kit.peers.ROOT", tmp_path)
    with pytest.raises(ConfigError, match="make setup-vllm"):
        vllm_binary()


def test_every_way_of_running_vllm_has_a_name() -> None:
    assert len({variant.name for variant in VLLM_VARIANTS}) == 4
