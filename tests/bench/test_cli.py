"""The command line, as a user types it."""

import json
from argparse import ArgumentParser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from bench import cli
from bench.kit.context import Context
from bench.kit.outcome import Outcome, Table
from bench.registry import BENCHES, Bench
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


@pytest.fixture(autouse=True)
def _one_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "load", lambda _: Counting())


def test_the_list_names_every_bench(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {bench.name} " in shown for bench in BENCHES)


def test_json_alone_is_on_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["engine", "--quick", "--to", "4", "--json", "-", "--out", str(tmp_path / "run")]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["figures"] == {"sum": 6.0, "quick": 1.0}
    assert "a note" in captured.err
    assert json.loads((tmp_path / "run" / "result.json").read_text())["name"] == "engine"
    assert json.loads((tmp_path / "run" / "config.json").read_text())["to"] == 4


def test_json_goes_to_a_file_and_the_table_to_people(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert cli.main(["engine", "--json", str(file), "--out", str(tmp_path)]) == 0
    assert json.loads(file.read_text())["config"]["quick"] is False
    shown = capsys.readouterr().out
    assert "sum" in shown
    assert "failures: 0" in shown


def test_what_goes_wrong_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["engine", "--to", "-1", "--out", str(tmp_path)]) == 1
    assert "cannot count to that" in capsys.readouterr().err
    assert cli.main(["no-such-bench"]) == 2
    assert "no bench 'no-such-bench'" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [40, 300])
def test_a_table_is_read_whole_whatever_the_terminal(columns: int) -> None:
    words = [f"a long word {number}" for number in range(9)]
    console = Console(width=columns, file=StringIO())
    cli.show("engine", Outcome({}, 0, [Table("cells", words, [words])], []), console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(shown.count(word) == 2 for word in words), "once as a column, once in its row"
    assert console.width == columns
