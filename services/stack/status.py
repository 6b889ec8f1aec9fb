"""`status`: what the supervisor knows of its children, and what every service says of itself.

Details are shown as they come: scalars in the services' table, lists of rows as tables of their own.
"""

import json
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import SecretStr
from rich.console import Console
from rich.table import Table

from services.stack.roll import RollCall
from services.stack.rundir import RunDirectory
from shared.config import BusConfig
from shared.errors import KvasirError
from shared.messages.reports import ServiceStatus

_DEADLINE_S = 1.0


async def status(run: RunDirectory, console: Console, *, as_json: bool) -> int:
    """0 when a stack runs and its bus answers, else 1."""
    pid, state = run.holder(), run.read_state()
    if pid is None or state.get("pid") != pid:
        message = f"nothing runs from {run.path}; `python -m services up` starts it"
        console.print(json.dumps({"running": False}) if as_json else message, highlight=False, markup=False)
        return 1
    problem, answers = None, []
    try:
        answers = await _ask_all(run, str(state["nats_url"]))
    except KvasirError as error:
        problem = error.message
    if as_json:
        services = [msgspec.to_builtins(answer) for answer in answers]
        whole = {"running": True, "stack": state, "services": services, "problem": problem}
        console.print(json.dumps(whole, indent=1), soft_wrap=True, highlight=False, markup=False)
    else:
        _show(console, state, answers)
        if problem:
            console.print(problem, style="red", markup=False)
    return 1 if problem else 0


async def _ask_all(run: RunDirectory, nats_url: str) -> list[ServiceStatus]:
    credentials = run.credentials()
    roll = RollCall(
        BusConfig(
            url=nats_url,
            user=credentials.nats_user,
            password=SecretStr(credentials.nats_password),
            connect_timeout_s=5.0,
        )
    )
    try:
        return await roll.ask_all(deadline_s=_DEADLINE_S)
    finally:
        await roll.close()


def _show(console: Console, state: Mapping[str, Any], answers: list[ServiceStatus]) -> None:
    console.print(
        f"[bold]{state.get('phase')}[/] {state.get('url')}  model {state.get('model') or '?'}  "
        f"pid {state.get('pid')}  NATS {state.get('nats_url')}",
        highlight=False,
    )
    console.print(_services_table(state, {answer.instance: answer for answer in answers}))
    for answer in answers:
        for name, rows in answer.details.items():
            if _is_table(rows):
                console.print(_rows_table(f"{answer.instance}: {name}", rows))


def _services_table(state: Mapping[str, Any], answers: Mapping[str, ServiceStatus]) -> Table:
    table = Table(title="services", title_justify="left", title_style="bold")
    for heading in ("instance", "pid", "state", "restarts", "up", "says"):
        table.add_column(heading, overflow="fold")
    children = {row["name"]: row for row in state.get("children", [])}
    for name in (*children, *(other for other in answers if other not in children)):
        row, answer = children.get(name, {}), answers.get(name)
        up_s = answer.uptime_s if answer else max(0.0, time.time() - row.get("started_unix_s", time.time()))
        said = _scalars(answer.details) if answer else "" if name == "nats" else "no answer on the bus"
        restarts = f"{row.get('restarts', '')}" + (f" ({row['last_exit']})" if row.get("last_exit") else "")
        table.add_row(
            name, str(row.get("pid") or ""), row.get("state", "elsewhere"), restarts, _ago(up_s), said
        )
    return table


def _is_table(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _rows_table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    headings = list(dict.fromkeys(key for row in rows for key in row))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(heading)) for heading in headings))
    return table


def _scalars(details: Mapping[str, Any]) -> str:
    return "  ".join(f"{key}={_cell(value)}" for key, value in details.items() if not _is_table(value))


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
