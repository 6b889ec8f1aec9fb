"""Versions on disk: numbered, whole, the newest that can be read."""

from pathlib import Path

import pytest
import torch

from services.predictor.models import versions
from services.predictor.models.network import Ensemble
from shared.errors import ConfigError


def network(seed: int = 0) -> Ensemble:
    torch.manual_seed(seed)
    return Ensemble(1).eval()


def test_what_was_written_is_read_again_with_what_is_known_of_it(tmp_path: Path) -> None:
    assert versions.latest(tmp_path / "none") is None
    made = network()
    path = versions.write(tmp_path / "new", made, {"samples": 7})
    read = versions.read(path)
    assert (read.number, read.version, read.report) == (1, "regressor-1", {"samples": 7})
    for name, tensor in made.state_dict().items():
        assert bool((read.network.state_dict()[name] == tensor).all())


def test_numbers_rise_and_only_the_last_few_stay(tmp_path: Path) -> None:
    for _ in range(4):
        versions.write(tmp_path, network(), {}, keep=2)
    assert [versions.number_of(path) for path in versions.paths(tmp_path)] == [3, 4]


def test_a_damaged_newest_is_passed_over(tmp_path: Path) -> None:
    versions.write(tmp_path, network(), {})
    newest = versions.write(tmp_path, network(1), {})
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="regressor-000002"):
        versions.read(newest)
    found = versions.latest(tmp_path)
    assert found is not None and found.number == 1


def test_one_of_another_layout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_LAYOUT", "another")
    path = versions.write(tmp_path, network(), {})
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="another release"):
        versions.read(path)


def test_other_files_are_no_versions(tmp_path: Path) -> None:
    (tmp_path / "served.jsonl").write_text("")
    assert versions.paths(tmp_path) == []
    with pytest.raises(ConfigError):
        versions.number_of(tmp_path / "served.jsonl")
