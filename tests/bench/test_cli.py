"""The command line as a user types it; every bench loads and is documented; what `bench house` counts."""

import argparse
import json
import re
import subprocess
import sys
import time
from argparse import ArgumentParser
from io import StringIO
from pathlib import Path

import psutil
import pytest
from pytest import CaptureFixture
from rich.console import Console

from bench import cli
from bench.house import ceilings, layers, static
from bench.kit.context import Context
from bench.kit.outcome import Outcome, Table
from bench.kit.provenance import ROOT
from bench.registry import BENCHES, Bench, find, names
from shared.errors import InternalError


class Counting:
    """A bench that counts."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--to", type=int, default=3)

    def run(self, context: Context) -> Outcome:
        if context.arguments.to < 0:
            raise InternalError("cannot count to that")
        numbers = [float(n) for n in range(context.arguments.to)]
        table = Table("numbers", ("n",), [(n,) for n in numbers])
        return Outcome({"sum": sum(numbers), "quick": float(context.quick)}, 0, [table], ["a note"])


@pytest.fixture
def one_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "load", lambda _: Counting())


def test_the_list_names_every_bench(capsys: CaptureFixture[str]) -> None:
    assert cli.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {bench.name} " in shown for bench in BENCHES)


@pytest.mark.usefixtures("one_bench")
def test_json_alone_is_on_standard_output(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    assert cli.main(["engine", "--quick", "--to", "4", "--json", "-", "--out", str(tmp_path / "run")]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["figures"] == {"sum": 6.0, "quick": 1.0} and "a note" in err
    assert json.loads((tmp_path / "run" / "result.json").read_text())["name"] == "engine"
    assert json.loads((tmp_path / "run" / "config.json").read_text())["to"] == 4
    file = tmp_path / "figures.json"  # There the table is for people.
    assert cli.main(["engine", "--json", str(file), "--out", str(tmp_path)]) == 0
    assert json.loads(file.read_text())["config"]["quick"] is False
    shown = capsys.readouterr().out
    assert "sum" in shown and "failures: 0" in shown


@pytest.mark.usefixtures("one_bench")
def test_what_goes_wrong_is_said(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    assert cli.main(["engine", "--to", "-1", "--out", str(tmp_path)]) == 1
    assert "cannot count to that" in capsys.readouterr().err and cli.main(["no-such-bench"]) == 2
    assert "no bench 'no-such-bench'" in capsys.readouterr().err


@pytest.mark.stack
def test_a_bench_that_is_ended_ends_its_stack(tmp_path: Path) -> None:
    """By SIGTERM, as from `timeout`: the stack stayed, on its ports and cores."""
    words = [sys.executable, "-m", "bench", "overhead", "--quick", "--out", str(tmp_path)]
    with subprocess.Popen(words, cwd=ROOT) as bench:
        while not (up := [each for each in psutil.Process(bench.pid).children() if "up" in each.cmdline()]):
            time.sleep(0.1)
        bench.terminate()
        assert bench.wait(60) == 143 and not up[0].is_running()


@pytest.mark.parametrize("columns", [40, 300])
def test_a_table_is_read_whole_whatever_the_terminal(columns: int) -> None:
    words = [f"a long word {number}" for number in range(9)]
    console = Console(width=columns, file=StringIO())
    cli.show("engine", Outcome({}, 0, [Table("cells", words, [words])], []), console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(shown.count(word) == 2 for word in words), "once as a column, once in its row"
    assert console.width == columns


_FRONT = (ROOT / "docs" / "benchmarks.md").read_text()
_PAGES = {page.stem: page.read_text() for page in (ROOT / "docs" / "benchmarks").glob("*.md")}


@pytest.mark.parametrize("bench", BENCHES, ids=names())
def test_it_can_be_loaded_and_has_its_flags(bench: Bench) -> None:
    module = bench.load()
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    assert callable(module.run)


def test_names_are_unique() -> None:
    assert len(set(names())) == len(names())
    with pytest.raises(KeyError):
        find("nothing-of-the-kind")


def test_every_bench_has_a_page_that_the_front_page_leads_to() -> None:
    assert len(_FRONT.split()) < 1300 and len(_FRONT.splitlines()) < 80  # read in two minutes
    assert set(_PAGES) == set(names())
    assert set(re.findall(r"\]\(benchmarks/([a-z0-9-]+)\.md\)", _FRONT)) == set(names())
    for name, page in _PAGES.items():
        assert page.startswith(f"# `{name}`\n")
        assert re.search(rf"python -m bench {name}\b", page), f"{name}.md says how to run it"


def test_every_command_in_the_documents_is_a_bench() -> None:
    for text in (_FRONT, *_PAGES.values()):
        commands = set(re.findall(r"python -m bench ([a-z][a-z0-9-]*)", text))
        assert commands - {"data", "record"} <= set(names())


TREE = {
    "services/__init__.py": "",
    "services/one.py": "from services import two\nfrom services.three import Link\n\n\nclass Lane: ...\n",
    "services/two.py": "class Link: ...\n",
    "services/three.py": "Link = int\nLIMIT = 3\n",
    "services/four.py": "from services.three import (\n    LIMIT,\n)\n",
    "services/config.py": "x = 1\n",
    "services/five.py": "import services.config\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> list[static.Module]:
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return static.modules(tmp_path, ["services"])


def test_rooms_that_import_each_other_share_a_box() -> None:
    circle = {"top": {"left"}, "left": {"right"}, "right": {"left", "base"}, "base": set[str]()}
    assert layers.without_cycles(circle) == {"top": {"left + right"}, "left + right": {"base"}, "base": set()}


def test_an_arrow_is_left_out_where_a_longer_way_leads_there() -> None:
    graph = {"top": {"middle", "base"}, "middle": {"base"}, "base": set[str]()}
    assert layers.without_detours(graph) == {"top": {"middle"}, "middle": {"base"}, "base": set()}


def test_a_room_imports_what_its_modules_import(tmp_path: Path) -> None:
    """Folders named core are one room, wherever they lie; the first pattern that fits counts."""
    for name, text in {
        "services/worker/kv/core/tree.py": "from shared.clock import Clock\n",
        "services/worker/kv/store.py": "from services.worker.kv.core.tree import Clock\n",
        "services/ledger/core/table.py": "import shared.clock\n",
        "shared/clock.py": "Clock = int\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    lines = [line.strip() for line in layers.mermaid(tmp_path).splitlines()]
    assert lines == [
        "flowchart TD",
        'r0["worker: kv/"]',
        'r1["core/, policy/: what services decide"]',
        'r2["shared: messages, subjects, configuration, errors"]',
        "r0 --> r1",
        "r1 --> r2",
    ]


def test_a_figure_above_its_ceiling_is_named_and_one_that_was_not_counted_is_not() -> None:
    house = ceilings.House({"lines": 10, "files": 3, "functions": 5}, {})
    assert house.excesses({"lines": 10, "files": 4}) == ["files is 4, and house.toml allows 3"]


def test_files_of_a_feature_that_is_off_are_found_below_its_folders() -> None:
    house = ceilings.House({}, {"Pie": ["services/worker/pie/*", "pool.py"], "roles": ["roles.py"]})
    touched = ["services/worker/pie/core/meter.py", "pool.py", "services/worker/pool.py"]
    assert house.off_files(touched) == {"Pie": ["pool.py", "services/worker/pie/core/meter.py"], "roles": []}


def test_the_projects_ceilings_and_patterns_are_about_what_there_is() -> None:
    """A pattern that matches no file would let its feature back onto every request's way."""
    root = Path(__file__).parent.parent.parent
    patterns = [pattern for each in ceilings.read(root).off.values() for pattern in each]
    assert [pattern for pattern in patterns if not list(root.glob(pattern))] == []
