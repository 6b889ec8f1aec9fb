"""`bench experiment` in the simulator: dry run, run, going on where it was; and one cell on a live stack."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.simulated.experiment.cells import CellQuestion, answer_simulated
from bench.simulated.experiment.grid import read_experiment
from shared.errors import ConfigError
from tests.installed import EXAMPLES, KINDS, install_examples

SIMULATED = """
name: small
grid:
  policy: [vllm, fastgen]
  predictor: [oracle]
  placement: [round_robin]
  trace: [alpaca]
  rate: [4, 8]
requests: 40
workers: 2
"""
LIVE = """
mode: live
grid: {policy: [POLICY], predictor: [PREDICTOR], placement: [PLACEMENT], eviction: [EVICTION], rate: [4]}
requests: 4
max_tokens: 24
settings: {worker.kv_blocks: 256}
"""


def experiment(folder: Path, text: str, *flags: str) -> dict[str, Any]:
    file = folder / "e.yaml"
    file.write_text(text)
    words = ["experiment", str(file), "--into", str(folder / "cells"), "--out", str(folder / "run")]
    assert main([*words, "--json", str(folder / "r.json"), "--processes", "1", *flags]) == 0
    content: dict[str, Any] = json.loads((folder / "r.json").read_text())
    return content


def test_a_dry_run_runs_nothing_and_a_second_run_only_what_is_missing(tmp_path: Path) -> None:
    cells = tmp_path / "cells"
    assert experiment(tmp_path, SIMULATED, "--dry-run")["figures"] == {"cells": 4, "cells_to_run": 4}
    assert not cells.exists()
    result = experiment(tmp_path, SIMULATED)
    assert result["figures"] == {"cells": 4, "cells_run": 4}
    assert result["simulated"] is True
    lost = next(cells.glob("fastgen-*-4-*"))
    (lost / "figures.json").unlink()
    assert experiment(tmp_path, SIMULATED)["figures"]["cells_run"] == 1
    assert experiment(tmp_path, SIMULATED, "--dry-run")["figures"]["cells_to_run"] == 0
    rows = list(csv.DictReader((cells / "summary.csv").read_text().splitlines()))
    assert {(row["policy"], row["rate"]) for row in rows} == {
        (p, r) for p in ("vllm", "fastgen") for r in "48"
    }
    assert all(float(row["normalized_s"]) > 0 and row["requests"] == "40.0" for row in rows)
    assert (cells / "latency_alpaca.png").read_bytes().startswith(b"\x89PNG")
    assert (cells / "summary.md").read_text().count("\n") == 6
    assert len((lost / "requests.jsonl").read_text().splitlines()) == 40


@pytest.mark.stack
def test_a_live_cell_starts_a_stack_of_its_own(tmp_path: Path) -> None:
    text = LIVE
    for kind, name in KINDS.items():
        text = text.replace(kind.upper(), f'"{name}"')
    result = experiment(tmp_path, text)
    assert result["failures"] == 0
    row = next(csv.DictReader((tmp_path / "cells" / "summary.csv").read_text().splitlines()))
    assert float(row["tokens_per_s"]) > 0
    assert (float(row["requests"]), float(row["turns"])) == (12, 3)
    assert float(row["normalized_s_low"]) < float(row["normalized_s"]) < float(row["normalized_s_high"])
    assert row["trace"] == "chats", "what was sent"
    for kind, name in KINDS.items():
        assert row[kind] == name


def mooncake(at: int) -> str:
    """A request of that trace: three whole blocks, the first shared by a third of all."""
    names = [at % 3, 10 + at % 5, at + 99]
    row = {"timestamp": 900 * at, "input_length": 1600, "output_length": 8, "hash_ids": names}
    return json.dumps(row) + "\n"


@pytest.mark.parametrize("is_installed", [False, True], ids=["by file", "by entry point"])
def test_what_comes_from_outside_is_an_axis_of_a_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    names = install_examples(tmp_path, monkeypatch) if is_installed else KINDS
    (tmp_path / "trace.jsonl").write_text("".join(map(mooncake, range(40))))
    text = f"""
grid:
  policy: [vllm, "{names["policy"]}"]
  predictor: [oracle, "{names["predictor"]}"]
  placement: [least_work, "{names["placement"]}"]
  eviction: [lru, "{names["eviction"]}"]
  trace: ["{tmp_path}/trace.jsonl"]
  rate: [2]
requests: 40
workers: 2
machine: {{cache_blocks: 6, capacity_blocks: 200}}
"""
    assert experiment(tmp_path, text)["figures"] == {"cells": 16, "cells_run": 16}
    rows = list(csv.DictReader((tmp_path / "cells" / "summary.csv").read_text().splitlines()))
    for kind, name in names.items():
        assert sum(row[kind] == name for row in rows) == 8
    ours = {row["normalized_s"] for row in rows if row["eviction"] == names["eviction"]}
    assert ours.isdisjoint(row["normalized_s"] for row in rows if row["eviction"] == "lru"), (
        "it evicts otherwise"
    )
    if not is_installed:
        cells = set((tmp_path / "cells").glob("longest_first.py.LongestFirst-*"))
        assert len(cells) == 8, "named after what they are"


def test_the_key_of_a_policy_is_the_order_of_its_queue(tmp_path: Path) -> None:
    """More than a worker serves: the shortest first have a far shorter median wait than the longest first.
    Before, both waited as long, whatever the policy said."""
    file = tmp_path / "orders.py"
    source = (EXAMPLES / "longest_first.py").read_text()
    file.write_text(source.replace("LongestFirst", "ShortestFirst").replace("-work_s", "work_s"))
    (tmp_path / "e.yaml").write_text(f"""
grid: {{policy: ["{file}:ShortestFirst", vllm, "{KINDS["policy"]}"], predictor: [oracle], rate: [6]}}
requests: 300
""")
    read = read_experiment(tmp_path / "e.yaml")
    shortest, first_come, longest = (
        answer_simulated(CellQuestion(read, cell)).figures["ttft_s_p50"] for cell in read.cells
    )
    assert 5 * shortest < first_come < longest / 1.5


TEXT = """
grid: {policy: [vllm], predictor: [none], placement: [least_work], trace: [alpaca], rate: [2]}
requests: 30
"""


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


DOCS = Path(__file__).parents[3] / "docs"
RECIPES = re.findall(r"^```yaml\n(.*?)^```", (DOCS / "experiments.md").read_text(), re.M | re.S)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_the_docs_write_can_be_run(recipe: str, tmp_path: Path) -> None:
    assert len(RECIPES) >= 4 and RECIPES[0] == (DOCS / "examples" / "policies.yaml").read_text()
    assert len(read_experiment(write(tmp_path, recipe)).cells) > 2


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
        ("rate: [1, 2.5]", "rate: {sharegpt: [1]}", "one for each trace: alpaca"),
        ("rate: [1, 2.5]", "rate: [-1]", "above 0"),
        ("[vllm, fastgen]", "[vllm, nobody]", "nobody"),
        ("tfs_tokens: 64", "tsf_tokens: 64", "no option 'tsf_tokens'; it has: tfs_tokens"),
        ("{tfs_tokens: 64}", "64", "OPTION: VALUE"),
        ("{fastgen:", "{nobody:", "nobody"),
        ("requests: 40", "requests: many", "whole number"),
        ("name: two", "mode: dreamt", "simulator or live"),
        ("name: two", "mode: live", "leave grid.trace out"),
        ("name: two", "turns: 5", "gives the same each time"),
        ("name: two\ngrid:", "mode: live\nturns: 2\ngrid:", "leave grid.trace out|at least 3"),
        ("rate: [1, 2.5]", "eviction: [lru]", "machine.cache_blocks"),
        ("rate: [1, 2.5]", "placement: [nowhere.py:Mine]", "there is no file"),
        ("name: two", "mode: live\nname: [", "cannot be read"),
        ("{capacity_blocks: 100}", "{blocks: 100}", "machine setting"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_experiment(write(tmp_path, GOOD.replace(old, new)))
