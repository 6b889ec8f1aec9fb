"""What each engine can have is looked at in the settings; what it cannot is refused in a sentence."""

from typing import Any

import pytest

from services.worker.config import WorkerConfig
from shared.config import load
from shared.errors import ConfigError


def settings(**fields: str) -> WorkerConfig:
    flags = [f"--{name.replace('__', '.')}={value}" for name, value in fields.items()]
    return load(WorkerConfig, "worker", flags, {})


def test_blocks_are_of_the_engines_size() -> None:
    assert settings().block_tokens == 16
    assert settings(engine="vllm").block_tokens == 32
    assert settings(engine="vllm", block_tokens="64").block_tokens == 64


@pytest.mark.parametrize("engine", ["native", "vllm", "simulated"])
def test_every_engine_may_lend_host_memory_and_have_its_cache_in_that_of_others(engine: str) -> None:
    found = settings(engine=engine, lending__host_mb="64", prefix_cache__peer_mb="1")
    assert (found.lending.host_mb, found.prefix_cache.peer_slots(1 << 18)) == (64, 4)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"engine": "vllm", "pie__enabled": "true"}, "leave out pie.enabled"),
        ({"engine": "vllm", "lending__borrow": "true"}, "leave out lending.borrow"),
        ({"engine": "vllm", "attention": "torch"}, "leave out attention"),
        ({"engine": "vllm", "states_every": "16"}, "leave out states_every"),
        ({"engine": "vllm", "device": "cuda", "vllm__tensor_parallel": "2"}, "set vllm.tensor_parallel 1"),
        ({"engine": "vllm", "block_tokens": "16"}, "blocks of a multiple of 32 tokens"),
        ({"engine": "simulated", "kv_bytes": "4096"}, "leave out kv_bytes"),
        ({"engine": "simulated", "pie__enabled": "true"}, "leave out pie.enabled"),
        ({"engine": "simulated", "states_every": "1"}, "leave out states_every"),
        ({"prefix_cache__peer_mb": "64", "prefix_cache__host_mb": "0"}, "peer_mb needs host_mb"),
    ],
)
def test_what_an_engine_lacks_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(**fields)
