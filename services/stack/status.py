"""`status`: what the supervisor knows of its children, and what every service says of itself.

Details are shown as they come: scalars as one row per instance, lists of rows as tables of their own.
"""

import json
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from services.stack.access import BusAccess
from services.stack.children import ChildState
from services.stack.display import say
from services.stack.roll import RollCall
from services.stack.rundir import RunDirectory
from shared import subjects
from shared.errors import KvasirError
from shared.messages.reports import ServiceStatus

_DEADLINE_S = 1.0
_CONNECT_S = 2.0
_COLUMN_MARGIN = 3


async def status(run: RunDirectory, console: Console, *, as_json: bool) -> int:
    """0 when a stack runs and its bus answers, else 1."""
    pid, state = run.holder(), run.read_state()
    if pid is None or state.get("pid") != pid:
        message = f"nothing runs from {run.path}; `python -m services up` starts it"
        console.print(json.dumps({"running": False}) if as_json else message, highlight=False, markup=False)
        return 1
    problem, answers = None, []
    try:
        names = [str(child["name"]) for child in state["children"]]
        expected = Counter(name.rpartition("-")[0] for name in names)
        answers = await _ask_all(BusAccess.from_state(state, run.credentials()), expected)
    except KvasirError as error:
        problem = error.message
    if as_json:
        services = [msgspec.to_builtins(answer) for answer in answers]
        whole = {"running": True, "stack": state, "services": services, "problem": problem}
        say(console, json.dumps(whole, indent=1))
    else:
        _show(console, state, answers)
        if problem:
            console.print(problem, style="red", markup=False)
    return 1 if problem else 0


async def _ask_all(access: BusAccess, expected: Mapping[str, int]) -> list[ServiceStatus]:
    roll = RollCall(access.config(subjects.OPERATOR, connect_timeout_s=_CONNECT_S))
    try:
        return await roll.ask_all(expected, deadline_s=_DEADLINE_S)
    finally:
        await roll.close()


def _show(console: Console, state: Mapping[str, Any], answers: list[ServiceStatus]) -> None:
    console.print(
        f"[bold]{state.get('phase')}[/] {state.get('url')}  model {state.get('model') or '?'}  "
        f"pid {state.get('pid')}  NATS {state.get('nats_url')}  "
        f"health and metrics {state.get('operator_url')}",
        highlight=False,
    )
    _print_rows(console, "processes", _process_rows(state, {answer.instance for answer in answers}))
    for service, group in groupby(answers, key=lambda answer: answer.service):
        same = list(group)
        _print_rows(console, service, [{"instance": a.instance, **_scalars(a.details)} for a in same])
        for answer in same:
            for name, rows in answer.details.items():
                if _is_table(rows):
                    _print_rows(console, f"{answer.instance}: {name}", rows)


def _process_rows(state: Mapping[str, Any], answering: Collection[str]) -> list[dict[str, Any]]:
    now_s = time.time()
    rows = []
    for child in state.get("children", []):
        name, exited, took_s = child["name"], child.get("last_exit"), child.get("took_s")
        is_service = name.rpartition("-")[0] in subjects.SERVICES and child["state"] != ChildState.PARKED
        silent = is_service and name not in answering
        rows.append(
            {
                "process": name,
                "pid": child.get("pid"),
                "state": f"{child['state']}, no answer on the bus" if silent else child["state"],
                "up": _ago(max(0.0, now_s - child.get("started_unix_s", now_s))),
                "start": None if took_s is None else f"{took_s:.1f} s",
                "restarts": f"{child['restarts']} ({exited})" if exited else child["restarts"],
            }
        )
    return rows


def _is_table(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _print_rows(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    """A table with a line per row, or, where that is too wide for the console, a column per row."""
    headings = list(dict.fromkeys(key for row in rows for key in row))
    lines = [[_cell(row.get(heading)) for heading in headings] for row in rows]
    columns = list(zip(headings, *lines, strict=True))
    width = sum(max(map(len, column)) + _COLUMN_MARGIN for column in columns)
    if width > console.width:
        headings, lines = list(columns[0]), [list(column) for column in columns[1:]]
    console.print(_table(title, headings, lines))


def _table(title: str, headings: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table


def _scalars(details: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in details.items() if not isinstance(value, list)}


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return " ".join(f"{key}:{_cell(inner)}" for key, inner in value.items())
    return str(value)


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
