"""`status` over a real bus, with a real predictor to answer."""

import io
import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from services.predictor.batching import Batcher
from services.predictor.models import create
from services.predictor.service import HANDLERS, Predictor
from services.stack.rundir import RunDirectory
from services.stack.status import _print_rows, status
from shared.config import BusConfig
from tests.conftest import ConnectBus


def live(path: Path, nats_url: str) -> RunDirectory:
    run = RunDirectory(path / "run")
    run.create()
    assert run.acquire()
    children = [
        {"name": name, "pid": 7, "state": "ready", "restarts": 1, "last_exit": "killed by SIGKILL"}
        for name in ("nats", "predictor-0", "worker-0")
    ]
    run.write_state(
        {"pid": os.getpid(), "phase": "ready", "nats_url": nats_url, "url": "u", "children": children}
    )
    return RunDirectory(path / "run")


async def shown(run: RunDirectory, *, as_json: bool) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=160)
    code = await status(run, console, as_json=as_json)
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


async def test_children_and_what_they_say(
    tmp_path: Path, bus_config: BusConfig, connect_bus: ConnectBus
) -> None:
    run = live(tmp_path, bus_config.url)
    bus = await connect_bus("predictor", "predictor-0")
    await bus.attach(HANDLERS, Predictor(bus, Batcher(create("histogram"))))
    code, text = await shown(run, as_json=False)
    assert code == 0
    assert "histogram-0" in text
    assert "1 (killed by SIGKILL)" in text
    silent = [line.split()[0] for line in text.splitlines() if "no answer on the bus" in line]
    assert silent == ["worker-0"]
    code, text = await shown(run, as_json=True)
    whole: dict[str, Any] = json.loads(text)
    assert code == 0
    assert [service["instance"] for service in whole["services"]] == ["predictor-0"]
    assert whole["stack"]["children"][2]["name"] == "worker-0"


def test_rows_too_wide_for_the_console_become_columns() -> None:
    rows = [{"instance": f"worker-{n}", "a_long_heading": n, "another_long_heading": n} for n in (0, 1)]
    wide, narrow = (Console(file=io.StringIO(), width=width) for width in (100, 50))
    for console in (wide, narrow):
        _print_rows(console, "worker", rows)
    assert isinstance(wide.file, io.StringIO)
    assert isinstance(narrow.file, io.StringIO)
    across = [line.split() for line in wide.file.getvalue().splitlines()]
    down = [line.split() for line in narrow.file.getvalue().splitlines()]
    assert ["worker-1", "1", "1"] in across
    assert ["another_long_heading", "0", "1"] in down


async def test_a_bus_that_is_away_is_a_problem_not_a_crash(tmp_path: Path, free_port: int) -> None:
    code, text = await shown(live(tmp_path, f"nats://127.0.0.1:{free_port}"), as_json=True)
    assert code == 1
    assert "no NATS connection" in json.loads(text)["problem"]
