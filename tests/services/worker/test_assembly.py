"""A worker made from its settings: its engine, its KV, threads on their cores."""

import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from services.worker import building
from services.worker.assembly import make_engine
from services.worker.building import build, free_bytes, kv_capacity
from services.worker.config import WorkerConfig
from services.worker.cores import bind_to
from services.worker.engine.contract import Row
from services.worker.engine.progress import LoadProgress
from shared.config import load
from shared.errors import ConfigError


def test_a_folder_without_a_model_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no model"):
        make_engine(WorkerConfig(model=str(tmp_path)))


def test_capacity_can_be_given_in_bytes(model_folder: Path) -> None:
    block_bytes = 2 * 2 * (16 + 16) * 4 * 4
    config = WorkerConfig(model=str(model_folder), block_tokens=4)
    engine = make_engine(config.model_copy(update={"kv_bytes": 11 * block_bytes + 5}))
    assert engine.kv_blocks == 11
    with pytest.raises(ConfigError, match=r"0 blocks of KV are too few"):
        make_engine(config.model_copy(update={"kv_bytes": block_bytes - 1}))


def test_there_is_one_form_of_pie_and_a_setting_for_another_is_refused() -> None:
    both = ["--pie.enabled", "true", "--lending.borrow", "true"]
    assert load(WorkerConfig, section="worker", argv=both).pie.enabled is True
    with pytest.raises(ConfigError, match=r"--pie\.form is no setting"):
        load(WorkerConfig, section="worker", argv=[*both, "--pie.form", "layers"])


pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be bound here")


def test_only_the_calling_thread_is_bound() -> None:
    here = os.sched_getaffinity(0)
    core = max(here)
    seen: list[set[int]] = []

    def bound() -> None:
        bind_to((core,))
        seen.append(os.sched_getaffinity(0))
        started_from_here = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        started_from_here.start()
        started_from_here.join()

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    assert seen == [{core}, {core}]
    assert os.sched_getaffinity(0) == here


def test_cores_that_are_not_there_are_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"engine_cores.*there are"):
        bind_to((100_000,), "engine_cores")


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
