"""A worker made from its settings: its engine, its KV, threads on their cores. What cannot be is refused."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.worker import building
from services.worker.assembly import on_its_gpu
from services.worker.building import build, free_bytes, kv_capacity
from services.worker.config import WorkerConfig
from services.worker.cores import bind_to
from services.worker.engine.contract import Row
from services.worker.engine.progress import LoadProgress
from shared.config import load
from shared.errors import ConfigError

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be bound here")


def test_cores_that_are_not_there_are_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"engine_cores.*there are"):
        bind_to((100_000,), "engine_cores")


@pytest.mark.parametrize(
    ("visible", "device", "seen"), [("", "cuda:1", "1"), ("GPU-a,3", "cuda:1", "3"), ("2,3", "cuda", "2,3")]
)
def test_a_worker_sees_its_own_gpu_alone(
    visible: str, device: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (
        on_its_gpu(WorkerConfig(device=device)).device == "cuda"
        and os.environ["CUDA_VISIBLE_DEVICES"] == seen
    )
    with pytest.raises(ConfigError, match="counted from 0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
        on_its_gpu(WorkerConfig(device="cuda:1"))


MIB = 1 << 20


def never() -> int:
    raise AssertionError("nobody asks what is free where the settings say how much")


def test_settings_go_first_and_bytes_before_blocks() -> None:
    assert kv_capacity(WorkerConfig(kv_blocks=7), MIB, never) == 7
    assert kv_capacity(WorkerConfig(kv_blocks=7, kv_bytes=3 * MIB + 5), MIB, never) == 3
    assert kv_capacity(WorkerConfig(kv_blocks=7, kv_memory_fraction=0.5), MIB, never) == 7


def test_otherwise_a_part_of_what_is_free_in_even_steps() -> None:
    assert kv_capacity(WorkerConfig(kv_memory_fraction=0.5), MIB, lambda: 1000 * MIB) == 448
    assert kv_capacity(WorkerConfig(), MIB, lambda: 8000 * MIB) == 384, "0.05 on a CPU"
    assert kv_capacity(WorkerConfig(device="cuda"), MIB, lambda: 1000 * MIB) == 832
    assert kv_capacity(WorkerConfig(kv_memory_fraction=0.5), MIB, lambda: 100 * MIB) == 50
    assert kv_capacity(WorkerConfig(), MIB, lambda: 0) == 0


def test_a_control_group_has_less_than_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, used = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(building, "_CONTROL_GROUPS", ((limit, used),))
    of_machine = free_bytes("cpu")
    assert of_machine > 64 * MIB, "there is no such group"
    limit.write_text("max\n")
    used.write_text("5\n")
    assert free_bytes("cpu") > 64 * MIB, "no limit"
    limit.write_text(f"{64 * MIB}\n")
    used.write_text(f"{60 * MIB}\n")
    assert free_bytes("cpu") == 4 * MIB
    used.write_text(f"{70 * MIB}\n")
    assert free_bytes("cpu") == 0


@pytest.mark.parametrize("settings", [{"kv_blocks": 2}, {"kv_bytes": 3 * 131072}, {"kv_blocks": 3}])
def test_too_few_blocks_are_refused_with_the_least_that_work(settings: dict[str, int]) -> None:
    """Two blocks were accepted, and the first chat ended the worker."""
    with pytest.raises(ConfigError, match=r"a request to this model needs 4; set worker\.kv_blocks=4"):
        build(WorkerConfig.model_validate(settings))


def test_the_least_blocks_compute_a_prompt_that_fills_them() -> None:
    engine = build(WorkerConfig(kv_blocks=4))
    blocks = engine.make_pool().allocate(4)
    engine.step([Row([1] * (4 * engine.block_tokens), 0, blocks, None)])


def test_an_architecture_that_is_not_supported_is_said_in_one_sentence(tmp_path: Path) -> None:
    """Not transformers' advice to install another transformers."""
    shutil.copytree("models/tiny_chat", tmp_path / "odd")
    config = tmp_path / "odd" / "config.json"
    odd = {**json.loads(config.read_text()), "model_type": "odd", "architectures": ["OddForCausalLM"]}
    config.write_text(json.dumps(odd))
    with pytest.raises(
        ConfigError, match="has the architecture OddForCausalLM, which Kvasir cannot"
    ) as raised:
        build(WorkerConfig(model=str(tmp_path / "odd")))
    assert "pip install" not in raised.value.message


def test_loading_says_how_far_it_is(tmp_path: Path) -> None:
    class Told(LoadProgress):
        def at(self, step: str | Callable[[], str]) -> None:
            super().at(step)
            steps.append(self.text)

    steps: list[str] = []
    build(WorkerConfig(kv_blocks=64), Told())
    shares = [step for step in steps if "%" in step]
    assert steps[0] == "reads the weights" and shares[0] == "reads the weights: 0 %" and len(shares) > 3
    assert steps[-2:] == ["compiles and sets up the engine", "warms up"]
    progress = LoadProgress()
    (tmp_path / "blobs").mkdir()
    with progress.downloading("org/name", tmp_path, 4_000_000):
        (tmp_path / "blobs" / "part.incomplete").write_bytes(bytes(1_000_000))
        assert re.match(r"downloads org/name: 1 MB of 4, \d+\.\d MB/s, \d+ s left$", progress.text)


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


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"engine": "vllm", "pie__enabled": "true"}, "leave out pie.enabled"),
        ({"engine": "vllm", "lending__borrow": "true"}, "leave out lending.borrow"),
        ({"engine": "vllm", "attention": "torch"}, "leave out attention"),
        ({"engine": "vllm", "states_every": "16"}, "leave out states_every"),
        ({"vllm__adapters": '{"a": "x"}'}, "engine native has no LoRA adapters: leave out vllm.adapters"),
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


def test_host_memory_is_one_budget_that_cache_pie_and_others_divide() -> None:
    found = settings()
    assert (found.cache_blocks(1 << 20), found.lent_blocks(1 << 20)) == (1024, 0)
    assert found.host_memory.bytes_of(found.host_memory.pie_share, 1) == 256 << 20
    lending = settings(host_memory__lent_share="0.5")
    assert (lending.cache_blocks(1 << 20), lending.lent_blocks(1 << 20)) == (512, 640)
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
