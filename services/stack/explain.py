"""`explain`: where the time of one request went, as the gateway puts it together from what all remember."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from services.stack.display import command_line, say
from services.stack.rundir import RunDirectory
from shared.errors import ConfigError, NoResponder

_DEADLINE_S = 30.0
_QUIET = {"unix_s", "instance", "kind"}


def explain(
    run: RunDirectory, console: Console, request_id: str, *, with_events: bool = False, as_json: bool = False
) -> int:
    """0 when somebody remembers the request, else 1. Raises ConfigError where no stack runs, NoResponder
    where its gateway does not answer."""
    pid, state = run.holder(), run.read_state()
    if pid is None or state.get("pid") != pid:
        raise ConfigError(f"nothing runs from {run.path}; `{command_line('up', run)}` starts it")
    told = _ask(f"{state['operator_url']}/ui/requests/{request_id}")
    if as_json:
        say(console, json.dumps(told, indent=1))
    elif not told["events"]:
        say(console, f"nobody remembers {request_id}: it is too long ago, or never was")
    else:
        _show(console, told, with_events=with_events)
    return 0 if told["events"] else 1


def _ask(url: str) -> dict[str, Any]:
    try:
        answer = httpx.get(url, timeout=_DEADLINE_S)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        raise NoResponder(f"the gateway did not say: {error}") from None
    return dict(answer.json())


def _show(console: Console, told: Mapping[str, Any], *, with_events: bool) -> None:
    account = told.get("account")
    if account is None:
        say(console, "its gateway does not remember it; what others do:")
        with_events = True
    else:
        say(console, account["sentence"])
        rows = [
            [f"{cause['share']:6.1%}", f"{cause['seconds']:.3f} s", cause["cause"], cause["note"]]
            for cause in account["causes"]
        ]
        console.print(_table(["share", "time", "cause", ""], rows))
    if with_events:
        began_s = told["events"][0]["unix_s"]
        rows = [
            [f"{event['unix_s'] - began_s:8.3f}", event["instance"], event["kind"], _fields(event)]
            for event in told["events"]
        ]
        console.print(_table(["after s", "where", "what", ""], rows))


def _fields(event: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in event.items() if name not in _QUIET)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(
            heading, overflow="fold", justify="right" if heading in ("share", "time") else "left"
        )
    for row in rows:
        table.add_row(*row)
    return table
