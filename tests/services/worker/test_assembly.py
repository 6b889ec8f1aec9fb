"""Parts of a worker made from its settings; threads on the cores they were bound to."""

import os
import threading
from pathlib import Path

import pytest

from services.worker.assembly import make_engine
from services.worker.config import WorkerConfig
from services.worker.prerequisites import bind_to
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
