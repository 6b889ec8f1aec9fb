"""The walk takes its commands from README and recipes, all of them, in order."""

import io
import re
from pathlib import Path

from tests.readme.newcomer import LINES, Line, Newcomer, fault_of
from tests.readme.walk import Step, Walk, pages, prepared, steps


def test_every_command_of_the_table_is_taken_in_order() -> None:
    found = [step.command for step in steps(pages())]
    rows = [line for line in pages().splitlines() if re.match(r"\| `(make|python|./kvasir)", line)]
    assert found[:2] == ["make up", "make test"] and len(found) == 2 + len(rows)
    assert all(f"`{command}`" in row for command, row in zip(found[2:], rows, strict=True))


def test_nothing_is_left_for_the_reader_to_fill_in() -> None:
    for step in steps(pages()):
        assert not re.search(r"[A-Z]{3,}_[A-Z]", prepared(step.command)), step.command


def test_a_command_is_run_on_a_terminal_and_its_failure_is_told(tmp_path: Path) -> None:
    out = io.StringIO()
    walk = Walk(tmp_path, out)
    assert walk.carry_out(Step("stty size; test -t 1", "")) is None
    assert walk.carry_out(Step("exit 3", "")) == "exit code 3"
    assert "24 80" in out.getvalue() and "[it did not: exit code 3" in out.getvalue()


def test_a_mistake_is_answered_by_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    assert fault_of("starting\nerror: no such file; write another\n", "write another") is None
    assert fault_of("error: no such file\n", "write another") == "the error does not say 'write another'"
    assert fault_of("usage:\nKeyError: 'x'\n", "x") == "0 lines say what is wrong"
    newcomer = Newcomer(tmp_path, io.StringIO())
    assert newcomer.type(Line("echo 'error: port {port} is taken'; exit 3", "80", True), 80) is None
    assert newcomer.type(Line("echo 'error: none'", "none", True), 80) == "exit code 0"
    assert sum(line.is_mistake for line in LINES) >= 10 <= sum(not line.is_mistake for line in LINES)
