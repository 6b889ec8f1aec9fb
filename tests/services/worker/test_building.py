"""How much KV a worker has: as settings say, or a part of what is free."""

from pathlib import Path

import pytest

from services.worker import building
from services.worker.building import free_bytes, kv_capacity
from services.worker.config import WorkerConfig

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
