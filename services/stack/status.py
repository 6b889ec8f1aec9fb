"""`status`: state of the children and self-reported status of the services. Without names, prints ten lines:
a verdict (`verdict.py`) and the most important instances. `all` prints one line per process. A named instance
or service prints its full status: scalars as one row per instance, lists as tables."""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec
from rich.console import Console

from services.stack.access import BusAccess
from services.stack.display import command_line, nothing_runs, say, table
from services.stack.roll_call import RollCall
from services.stack.rundir import RunDirectory
from services.stack.supervisor import ChildState
from services.stack.verdict import instances_of, troubles, used_share, verdict
from shared import subjects
from shared.errors import ConfigError, KvasirError
from shared.messages.reports import ServiceStatus

_DEADLINE_S = 1.0
_CONNECT_S = 2.0
_COLUMN_MARGIN = 3
_WIDTH = 80
_WORKER_EXTRAS = {"lent_blocks": "lent", "borrowed_blocks": "borrowed", "pie_fifo_layers": "layers swapped"}
_MOST_ROWS = 4
"""Ten lines together with head, verdict and hint."""
ALL = "all"


async def status(run: RunDirectory, console: Console, *, as_json: bool, names: Sequence[str] = ()) -> int:
    """Return 0 if a stack runs and its bus replies, else 1. `names` are instances or services. Raise
    ConfigError for an unknown name."""
    pid, state = run.holder(), run.read_state()
    if pid is None or state.get("pid") != pid:
        say(console, json.dumps({"running": False}) if as_json else nothing_runs(run))
        return 1
    problem, answers = None, []
    there = [name for child in state["children"] for name in instances_of(child)]
    _refuse_unknown([name for name in names if name != ALL], there)
    try:
        expected = Counter(name.rpartition("-")[0] for name in there)
        answers = await _ask_all(BusAccess.from_state(state, run.credentials()), expected)
    except KvasirError as error:
        problem = error.message
    if as_json:
        services = [msgspec.to_builtins(answer) for answer in answers]
        wrong = [problem] if problem else troubles(state["children"], answers, time.time(), run.low_disk())
        whole = {"running": True, "stack": state, "services": services, "problem": problem}
        whole |= {"well": not wrong, "troubles": wrong}
        say(console, json.dumps(whole, indent=1))
    else:
        if ALL in names:
            rows = [
                {"process": row.name, "state": row.state, "up": _ago(row.up_s), "": row.note}
                for row in process_rows(state, answers)
            ]
            console.print(table(list(rows[0]), [list(row.values()) for row in rows]))
        elif names:
            _show_details(console, [one for one in answers if {one.instance, one.service} & set(names)])
        else:
            _show_summary(console, state, answers, run)
        if problem:
            console.print(problem, style="red", markup=False)
    return 1 if problem else 0


async def _ask_all(access: BusAccess, expected: Mapping[str, int]) -> list[ServiceStatus]:
    roll = RollCall(access.config(subjects.OPERATOR, connect_timeout_s=_CONNECT_S))
    try:
        return await roll.ask_all(expected, deadline_s=_DEADLINE_S)
    finally:
        await roll.close()


def _refuse_unknown(names: Sequence[str], there: Sequence[str]) -> None:
    known = sorted({*there, *(name.rpartition("-")[0] for name in there)} & {*there, *subjects.SERVICES})
    for name in names:
        if name not in known:
            raise ConfigError(f"nothing here is called {name!r}; there are {', '.join(known)}")


def _show_summary(
    console: Console, state: Mapping[str, Any], answers: Sequence[ServiceStatus], run: RunDirectory
) -> None:
    since_s = max(0.0, time.time() - state.get("started_unix_s", time.time()))
    model = next((answer.details.get("model") for answer in answers if answer.service == "gateway"), "")
    model = model or state.get("model") or "?"
    rows = process_rows(state, answers)
    well, *rest = verdict(state.get("children", []), answers, time.time(), run.low_disk())
    say(console, well)
    say(console, f"{state.get('phase')}, since {_ago(since_s)}: {state.get('url')}, model {model}")
    if "operator_url" in state:
        say(console, f"health and metrics: {state['operator_url']}")
    for line in rest:
        say(console, line)
    shown = sorted(rows, key=lambda row: row.urgency)[:_MOST_ROWS]
    width = max(len(row.name) for row in shown)
    for row in shown:
        text = f"{row.name:{width}}  {row.state}  {row.note}".rstrip()
        say(console, text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…")
    one = next((answer.instance for answer in answers if answer.service == "worker"), "gateway-0")
    more = f"each of {len(rows)}: {command_line(f'status {ALL}', run)}; of one: status {one}"
    say(console, more)


def _show_details(console: Console, answers: Sequence[ServiceStatus]) -> None:
    for service, group in groupby(answers, key=lambda answer: answer.service):
        same = list(group)
        whole = [{"instance": one.instance, **one.details} for one in same]
        scalars = [{key: value for key, value in row.items() if not isinstance(value, list)} for row in whole]
        _print_rows(console, service, scalars)
        for answer in same:
            for name, rows in answer.details.items():
                if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
                    _print_rows(console, f"{answer.instance}: {name}", rows)


@dataclass(frozen=True)
class ProcessRow:
    """One instance: the supervisor's data and a few of its own figures."""

    name: str
    state: str
    up_s: float
    note: str
    is_odd: bool
    """Not ready, not replying, or restarted."""
    weight: tuple[float, ...]
    """Sort key; higher is more important."""

    @property
    def urgency(self) -> tuple[object, ...]:
        """Sort key: problems first, then scheduler, fullest workers, others."""
        return not self.is_odd, tuple(-each for each in self.weight)


def process_rows(state: Mapping[str, Any], answers: Sequence[ServiceStatus]) -> list[ProcessRow]:
    """Return rows for all instances, in the supervisor's order."""
    said = {answer.instance: answer for answer in answers}
    return [
        _process_row(name, child, said.get(name))
        for child in state.get("children", [])
        for name in instances_of(child)
    ]


def _process_row(name: str, child: Mapping[str, Any], answer: ServiceStatus | None) -> ProcessRow:
    service = name.rpartition("-")[0]
    is_asked = service in subjects.SERVICES and child["state"] != ChildState.PARKED
    is_silent = is_asked and answer is None
    note = "no answer on the bus" if is_silent else "" if answer is None else _summary(answer)
    if child["restarts"]:
        note = f"restarts: {child['restarts']} ({child.get('last_exit')}) {note}"
    is_odd = (
        is_silent or bool(child["restarts"]) or child["state"] not in (ChildState.READY, ChildState.PARKED)
    )
    now_s = time.time()
    up_s = max(0.0, now_s - child.get("started_unix_s", now_s))
    return ProcessRow(name, str(child["state"]), up_s, note, is_odd, _weight(service, answer))


def _weight(service: str, answer: ServiceStatus | None) -> tuple[float, ...]:
    if service == "scheduler":
        return (3.0,)
    if service != "worker":
        return (1.0 if service == "gateway" else 0.0,)
    if answer is None:
        return (2.0,)
    said = answer.details
    extras = sum(bool(said.get(key)) for key in _WORKER_EXTRAS)
    return (2.0, extras, used_share(said), said.get("sequences", 0))


def _summary(answer: ServiceStatus) -> str:
    """Return the key figures of an instance."""
    said = answer.details
    match answer.service:
        case "gateway":
            return f"{said.get('active', 0)} answers in progress"
        case "scheduler":
            waiting = f"{said.get('running', 0)} running, {said.get('queued', 0)} queued"
            shards = f"leads {said['leads']}, " if "leads" in said else ""
            return f"{shards}{said.get('policy')}: {waiting}, {said.get('preemptions', 0)} preempted"
        case "predictor":
            return f"{said.get('model_version') or said.get('model')}: {said.get('predictions', 0)} predicted"
        case "placement":
            return f"{said.get('policy')}: {said.get('placed', 0)} placed"
        case "ledger":
            return f"{said.get('questions', 0)} asked for a lender, {said.get('settlements', 0)} settlements"
        case "worker":
            return _worker_summary(said)
    return ""


def _worker_summary(said: Mapping[str, Any]) -> str:
    used = f"{100 * used_share(said):.0f} %"
    parts = [f"{said.get('sequences', 0)} running, KV {used}"]
    parts += [f"{said[key]} {word}" for key, word in _WORKER_EXTRAS.items() if said.get(key)]
    return ", ".join(parts)


def _print_rows(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    """Print one line per row, or one column per row if that is too wide."""
    headings = list(dict.fromkeys(key for row in rows for key in row))
    lines = [[_cell(row.get(heading)) for heading in headings] for row in rows]
    columns = list(zip(headings, *lines, strict=True))
    width = sum(max(map(len, column)) + _COLUMN_MARGIN for column in columns)
    if width > console.width:
        headings, lines = list(columns[0]), [list(column) for column in columns[1:]]
    console.print(table(headings, lines, title))


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
