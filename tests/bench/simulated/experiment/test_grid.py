"""Experiment files: the grid, what is refused, and folders that change with what determines a result."""

from pathlib import Path

import pytest

from bench.simulated.experiment.grid import read_experiment
from shared.errors import ConfigError

GOOD = """
name: two
grid:
  policy: [vllm, fastgen]
  rate: [1, 2.5]
  trace: [alpaca]
requests: 40
machine: {capacity_blocks: 100}
options: {fastgen: {tfs_tokens: 64}}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "experiment.yaml"
    path.write_text(text)
    return path


def test_the_grid_is_the_product_of_its_axes(tmp_path: Path) -> None:
    experiment = read_experiment(write(tmp_path, GOOD))
    assert [(cell.policy, cell.rate) for cell in experiment.cells] == [
        ("vllm", 1),
        ("vllm", 2.5),
        ("fastgen", 1),
        ("fastgen", 2.5),
    ]
    assert experiment.machine.capacity_blocks == 100
    assert experiment.mode == "simulator"


def test_a_folder_belongs_to_everything_that_determines_the_result(tmp_path: Path) -> None:
    first = read_experiment(write(tmp_path, GOOD))
    folders = {first.folder(cell) for cell in first.cells}
    assert len(folders) == 4
    same = read_experiment(write(tmp_path, GOOD.replace("two", "other name")))
    assert {same.folder(cell) for cell in same.cells} == folders
    for old, new in (("40", "41"), ("100}", "101}")):
        changed = read_experiment(write(tmp_path, GOOD.replace(old, new)))
        assert not {changed.folder(cell) for cell in changed.cells} & folders
    changed = read_experiment(write(tmp_path, GOOD.replace("64", "65")))
    assert len({changed.folder(cell) for cell in changed.cells} & folders) == 2, "those of vllm"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("grid:", "grids:", "unknown key grids"),
        ("rate: [1, 2.5]", "speed: [1]", "unknown axis"),
        ("rate: [1, 2.5]", "rate: 3", "write a list"),
        ("rate: [1, 2.5]", "rate: [-1]", "above 0"),
        ("[vllm, fastgen]", "[vllm, nobody]", "nobody"),
        ("tfs_tokens: 64", "tsf_tokens: 64", "no option 'tsf_tokens'; it has: tfs_tokens"),
        ("{tfs_tokens: 64}", "64", "OPTION: VALUE"),
        ("{fastgen:", "{nobody:", "nobody"),
        ("requests: 40", "requests: many", "whole number"),
        ("name: two", "mode: dreamt", "simulator or live"),
        ("name: two", "mode: live\nname: [", "cannot be read"),
        ("{capacity_blocks: 100}", "{blocks: 100}", "machine setting"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_experiment(write(tmp_path, GOOD.replace(old, new)))


def test_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_experiment(tmp_path / "none.yaml")
