"""A run's directory, its random numbers and its record."""

import io
import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bench.kit.context import Context
from bench.kit.provenance import ROOT


def make(tmp_path: Path, seed: int = 0, **flags: object) -> Context:
    return Context("name", quick=True, seed=seed, run_dir=tmp_path, arguments=Namespace(**flags))


def test_random_numbers_depend_on_seed_and_purpose_only(tmp_path: Path) -> None:
    first, again = make(tmp_path).random("a"), make(tmp_path).random("a")
    assert first.random() == again.random()
    others = {make(tmp_path, seed).random(purpose).random() for seed in (0, 1) for purpose in ("a", "b")}
    assert len(others) == 4


def test_records_are_appended_as_lines(tmp_path: Path) -> None:
    context = make(tmp_path)
    context.record({"a": 1})
    context.record({"a": 2})
    lines = (tmp_path / "requests.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"a": 1}, {"a": 2}]


def test_the_configuration_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    resolved = make(tmp_path, model=ROOT / "models" / "tiny_chat", out=tmp_path / "x").resolved()
    assert (resolved["model"], resolved["out"]) == ("models/tiny_chat", "x")
    assert str(ROOT) not in json.dumps(resolved)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_counts_on_a_terminal_and_is_one_line_elsewhere(tmp_path: Path, is_terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal)
    with replace(make(tmp_path), console=console).progress("work", 2) as progress:
        progress.advance(now="one")
        (task,) = progress._bar.tasks
        assert (task.completed, task.description) == (1, "work one")
        progress.advance()
        assert (task.completed, task.description) == (2, "work")
    assert "2/2" in out.getvalue() if is_terminal else out.getvalue() == "work: 2\n"
