"""`bench experiment` in the simulator: dry run, run, going on where it was; and one cell on a live stack."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench.cli import main, show
from bench.kit.outcome import Outcome
from bench.simulated.experiment.bench import _draw
from bench.simulated.experiment.cells import CellQuestion, answer_simulated
from bench.simulated.experiment.grid import GridCell, read_experiment
from bench.simulated.experiment.report import LIMIT, closing, knee_of, reports, tables
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


def experiment(folder: Path, text: str, *flags: str, file: str = "e.yaml") -> dict[str, Any]:
    (folder / file).write_text(text)
    words = ["experiment", str(folder / file), "--into", str(folder / "cells"), "--out", str(folder / "run")]
    assert main([*words, "--json", str(folder / "r.json"), "--processes", "1", *flags]) == 0
    content: dict[str, Any] = json.loads((folder / "r.json").read_text())
    return content


def test_a_dry_run_runs_nothing_and_a_second_run_only_what_is_missing(tmp_path: Path) -> None:
    cells = tmp_path / "cells"
    assert experiment(tmp_path, SIMULATED, "--dry-run")["figures"] == {"cells": 4, "cells_to_run": 4}
    assert not cells.exists()
    result = experiment(tmp_path, SIMULATED)
    assert result["figures"] == {"cells": 4, "cells_run": 4} and result["simulated"] is True
    lost = next(cells.glob("fastgen-*-4-*"))
    (lost / "figures.json").unlink()
    assert experiment(tmp_path, SIMULATED)["figures"]["cells_run"] == 1
    assert experiment(tmp_path, SIMULATED, "--dry-run")["figures"]["cells_to_run"] == 0
    rows = list(csv.DictReader((cells / "summary.csv").read_text().splitlines()))
    assert {row["policy"] + row["rate"] for row in rows} == {"vllm4", "vllm8", "fastgen4", "fastgen8"}
    assert all(float(row["normalized_s"]) > 0 and row["requests"] == "40.0" for row in rows)
    assert (cells / "latency_alpaca.png").read_bytes().startswith(b"\x89PNG")
    assert (cells / "summary.md").read_text().count("\n") == 6
    assert len((lost / "requests.jsonl").read_text().splitlines()) == 40


def test_what_a_run_wrote_is_repeated_to_the_digit_elsewhere(tmp_path: Path) -> None:
    experiment(tmp_path, SIMULATED)
    text = (tmp_path / "cells" / "cited.json").read_text()
    cited = json.loads(text)
    assert cited["made"]["versions"]["python"] and len(cited["figures"]) == 4
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert experiment(elsewhere, text, file="c.json")["figures"]["cells_same"] == 4
    next(iter(cited["figures"].values()))["tokens_per_s"] += 1e-9
    other = experiment(elsewhere, json.dumps(cited), file="c.json")
    assert (other["figures"]["cells_same"], other["failures"]) == (3, 1)


@pytest.mark.slow
@pytest.mark.stack
def test_a_live_cell_starts_a_stack_of_its_own(tmp_path: Path) -> None:
    text = LIVE
    for kind, name in KINDS.items():
        text = text.replace(kind.upper(), f'"{name}"')
    result = experiment(tmp_path, text)
    assert result["failures"] == 0
    row = next(csv.DictReader((tmp_path / "cells" / "summary.csv").read_text().splitlines()))
    assert float(row["tokens_per_s"]) > 0 and (float(row["requests"]), float(row["turns"])) == (12, 3)
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
    assert ours.isdisjoint(r["normalized_s"] for r in rows if r["eviction"] == "lru"), "it evicts others"
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
    answers = (answer_simulated(CellQuestion(read, cell)) for cell in read.cells)
    shortest, first_come, longest = (answer.figures["ttft_s_p50"] for answer in answers)
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
    cells = [(cell.policy, cell.rate) for cell in experiment.cells]
    assert cells == [("vllm", 1), ("vllm", 2.5), ("fastgen", 1), ("fastgen", 2.5)]
    assert experiment.machine.capacity_blocks == 100 and experiment.mode == "simulator"


DOCS = Path(__file__).parents[3] / "docs"
RECIPES = re.findall(r"^```yaml\n(.*?)^```", (DOCS / "experiments.md").read_text(), re.M | re.S)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_the_docs_write_can_be_run(recipe: str, tmp_path: Path) -> None:
    assert len(RECIPES) >= 3 and RECIPES[0] == (DOCS / "examples" / "policies.yaml").read_text()
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


RATES = (1.0, 2.0, 3.0, 4.0)


def results(**latencies: tuple[float, ...]) -> list[tuple[GridCell, dict[str, float]]]:
    """By `policy` or `policy__predictor`: normalized latency in s at each rate."""
    made = []
    for name, curve in latencies.items():
        policy, _, predictor = name.partition("__")
        for rate, latency_s in zip(RATES, curve, strict=False):
            cell = GridCell(policy, predictor or "none", "best_fit", "frequent", "alpaca", rate, 0)
            made.append((cell, {"normalized_s": latency_s, "ttft_s_p50": 1.0, "failures": 0.0, "slo": 0.5}))
    return made


@given(st.lists(st.floats(0.001, 1000), min_size=2, max_size=8), st.floats(0.01, 100))
def test_a_knee_lies_between_the_last_good_rate_and_the_next(latencies: list[float], limit: float) -> None:
    curve = [(float(at), latency) for at, latency in enumerate(latencies, start=1)]
    knee = knee_of(curve, limit)
    over = next((at for at, latency in curve if latency > limit), None)
    if over is None:
        assert knee == float("inf")
    elif over == 1.0:
        assert knee is None
    else:
        assert knee is not None and over - 1 <= knee <= over


def test_those_that_go_furthest_come_first_and_the_sentence_says_how_far() -> None:
    cells = results(slow=(1.0, 9.0, 90.0, 99.0), quick=(1.0, 1.0, 9.0, 90.0), never=(9.0, 9.0, 9.0, 9.0))
    (report,) = reports(cells)
    assert report.limit_s == LIMIT * 1.0
    assert [side[0] for side in report.ranked()] == ["quick", "slow", "never"]
    assert closing(cells) == (
        "On alpaca quick goes furthest, to 2.5 requests/s, 1.67 × slow and never (below the lowest)."
    )
    ranking, by_rate = tables(cells)
    assert [row[:3] for row in ranking.rows] == [(1, "quick", "2.5"), (2, "slow", "1.5"), (3, "never", "<1")]
    assert by_rate.columns == ("policy", "1", "2", "3", "4")


def test_tables_fit_80_columns_and_the_sentence_is_last(tmp_path: Path) -> None:
    cells = results(ecoserve_profile__histogram=(0.01234, 0.1, 123.4), vllm__regressor=(0.0123, 0.4, 55.5))
    said = io.StringIO()
    outcome = Outcome({"cells": 8.0}, 0, tables(cells), ["a note"], closing=closing(cells))
    show("experiment", outcome, Console(file=said, width=80))
    tabled, _, rest = said.getvalue().partition("experiment")
    assert max(len(line) for line in tabled.splitlines()) <= 80 and " ".join(rest.split()).endswith("× vllm.")
    _draw(tmp_path, cells)
    assert (tmp_path / "latency_alpaca.png").read_bytes().startswith(b"\x89PNG")


def test_sides_whose_intervals_overlap_share_a_place() -> None:
    """Nobody is called the fastest who may not be."""
    cells = results(a=(1.0,), b=(1.1,), c=(2.0,))
    reach = {"a": 0.2, "b": 0.2, "c": 0.1}
    for cell, figures in cells:
        for end, sign in (("low", -1), ("high", 1)):
            figures[f"normalized_s_{end}"] = figures["normalized_s"] + sign * reach[cell.policy]
    (ranking,) = tables(cells)
    assert [row[:2] for row in ranking.rows] == [(1, "a"), (1, "b"), (3, "c")]
    assert ranking.rows[0][2] == "1 ±0.2"
    said = closing(cells)
    assert said.startswith("On alpaca a is fastest with 1 s a token, before c (2); the intervals of b")
