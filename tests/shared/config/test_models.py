"""What holds for every configuration."""

from typing import Any

import pytest
from pydantic import ValidationError

from shared.config import ModelServiceConfig, ServiceConfig
from tests.shared.config.gateway import GatewayConfig


def test_it_is_frozen_and_reads_nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_GATEWAY__PORT", "9")
    monkeypatch.setenv("KVASIR_PORT", "9")
    config = GatewayConfig(port=7)
    assert config.port == 7 and GatewayConfig().port == 8000
    with pytest.raises(ValidationError, match="frozen"):
        config.port = 8
    with pytest.raises(ValidationError, match="frozen"):
        config.bus.url = "nats://x:1"


def test_the_default_instance_follows_the_class() -> None:
    class LongNamedConfig(ServiceConfig):
        pass

    given: dict[str, Any] = {"instance": "other-1"}
    assert LongNamedConfig().instance == "long-named-0" and LongNamedConfig(**given).instance == "other-1"


def test_a_model_is_called_by_the_last_part_of_where_it_is_unless_it_is_named() -> None:
    assert ModelServiceConfig().served_name == "tiny_chat"
    assert ModelServiceConfig(model="someone/big-one").served_name == "big-one"
    assert ModelServiceConfig(model="/data/models/mine/", served_name="ours").served_name == "ours"
