"""What each engine can have is looked at in the settings; what it cannot is refused in a sentence."""

import re
from pathlib import Path
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
    found = settings(engine=engine, host_memory__lent_share="0.05", prefix_cache__peer_mb="1")
    assert (found.lent_blocks(1 << 20), found.prefix_cache.peer_slots(1 << 18)) == (64, 4)


def test_host_memory_is_one_budget_that_cache_pie_and_others_divide() -> None:
    found = settings()
    assert (found.cache_blocks(1 << 20), found.lent_blocks(1 << 20)) == (256, 0)
    assert found.host_memory.bytes_of(found.host_memory.pie_share, 1) == 1024 << 20
    thirds = settings(
        host_memory__blocks="21", host_memory__cache_share="0.3334", host_memory__lent_share="0.6666"
    )
    assert (thirds.cache_blocks(5), thirds.lent_blocks(5), thirds.host_memory.pie_share) == (7, 14, 0)
    assert settings(prefix_cache__enabled="false").cache_blocks(1 << 20) == 0
    with pytest.raises(ConfigError, match="lent_share holds no block: one takes 2147483648 bytes"):
        settings(host_memory__lent_share="0.05").lent_blocks(2 << 30)


@pytest.mark.parametrize(
    "section, name, words",
    [
        ("prefix_cache", "host_mb", "write worker.host_memory.mb or .blocks, and .cache_share"),
        ("prefix_cache", "host_blocks", "write worker.host_memory.mb or .blocks, and .cache_share"),
        ("lending", "host_mb", "write worker.host_memory.mb or .blocks, and .lent_share"),
        ("lending", "host_blocks", "write worker.host_memory.mb or .blocks, and .lent_share"),
        ("pie", "host_mb", "write worker.host_memory.mb; Pie has what"),
    ],
)
def test_earlier_names_of_its_parts_are_refused_with_what_to_write(
    section: str, name: str, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "kvasir.yaml"
    file.write_text(f"worker:\n  {section}:\n    {name}: 64\n")
    ways: tuple[tuple[list[str], dict[str, str]], ...] = (
        ([f"--{section}.{name}=64"], {}),
        ([], {f"KVASIR_WORKER__{section.upper()}__{name.upper()}": "64"}),
        ([f"--config={file}"], {}),
    )
    for flags, environ in ways:
        with pytest.raises(ConfigError, match=re.escape(words)):
            load(WorkerConfig, "worker", flags, environ)


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
        ({"prefix_cache__peer_mb": "64", "host_memory__mb": "0"}, "peer_mb needs host_memory"),
        ({"pie__enabled": "true", "host_memory__cache_share": "1"}, "pie.enabled needs host memory"),
        ({"host_memory__cache_share": "0.6", "host_memory__lent_share": "0.6"}, "exceed 1: lower one"),
    ],
)
def test_what_an_engine_lacks_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(**fields)
