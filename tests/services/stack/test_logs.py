"""`logs` shows what all processes logged, in the order in which it happened, as a person reads it."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from services.stack.logs import _news, logs, reason
from services.stack.rundir import RunDirectory
from shared.errors import ConfigError


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.create()
    return run


def write(run: RunDirectory, name: str, *entries: "tuple[str, str, str] | str") -> Path:
    path = run.logs / f"{name}.log"
    with path.open("a") as file:
        for entry in entries:
            if isinstance(entry, str):
                file.write(entry + "\n")
            else:
                at, level, event = entry
                line = {"time": f"2026-01-01T00:00:{at}+00:00", "level": level, "event": event, "blocks": 3}
                file.write(json.dumps({**line, "instance": name, "service": "x"}) + "\n")
    return path


def shown(run: RunDirectory, *names: str, lines: int = 40) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    assert logs(run, console, names, lines=lines) == 0
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_lines_of_all_in_order_without_json(run: RunDirectory) -> None:
    write(run, "worker-0", ("01.000", "info", "first"), ("03.000", "error", "third"))
    write(run, "nats", "[1] plain words")
    write(run, "gateway-0", ("02.000", "warning", "second"))
    told = shown(run)
    assert [line.split()[0] for line in told] == ["nats", "worker-0", "gateway-0", "worker-0"]
    assert told[0].endswith("[1] plain words")
    assert told[1].endswith("INFO    first blocks=3") and "{" not in told[1]
    assert [line.split() for line in shown(run, "worker-0", lines=1)] == [told[-1].split()]


def test_what_comes_is_shown_once_whole_and_in_order_whoever_it_is_of(run: RunDirectory) -> None:
    """The first line of each look was lost, and files were shown one after the other."""
    write(run, "worker-0", ("01.000", "info", "before"))
    first = write(run, "gateway-0", ("02.000", "info", "before"))
    files, ends = {path.stem: path for path in run.logs.glob("*.log")}, dict[str, int]()
    assert len(_news(files, ends)) == 2 and _news(files, ends) == []
    write(run, "worker-0", ("05.000", "info", "third"), ("06.000", "info", "fourth"))
    write(run, "gateway-0", ("04.000", "info", "second"))
    files["worker-1"] = write(run, "worker-1", ("03.000", "info", "first"))
    said = [(name, line.split()[2]) for _, name, line in _news(files, ends)]
    assert said == [
        ("worker-1", "first"),
        ("gateway-0", "second"),
        ("worker-0", "third"),
        ("worker-0", "fourth"),
    ]
    with first.open("a") as file:
        file.write("half a")
    assert _news(files, ends) == []
    with first.open("a") as file:
        file.write(" line\n")
    assert [line for _, _, line in _news(files, ends)] == ["half a line"]
    first.write_text("begun anew\n")
    assert [line for _, _, line in _news(files, ends)] == ["begun anew"]


def test_a_name_without_a_log_is_refused_with_those_there_are(run: RunDirectory) -> None:
    write(run, "worker-0", "x")
    with pytest.raises(ConfigError, match="no log of 'worker-9'; there are worker-0"):
        logs(run, Console(file=io.StringIO()), ["worker-9"])


def test_the_reason_of_an_end_is_the_last_error_that_was_said(run: RunDirectory) -> None:
    path = write(run, "worker-0", ("01.000", "error", "config_error: too small"), ("02.000", "info", "ended"))
    assert reason(path) == "config_error: too small"
    assert reason(write(run, "gateway-0", "error: gateway: port: no")) == "gateway: port: no"
    assert reason(write(run, "nats", "Traceback", "  File x")) is None
    assert reason(run.logs / "none.log") is None
