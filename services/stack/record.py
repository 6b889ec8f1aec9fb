"""`record`: write the recent events of all instances to one file, ordered by wall clock."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from services.stack.access import BusAccess
from services.stack.chrome_trace import chrome_trace
from services.stack.display import running_state, say
from services.stack.roll_call import RollCall
from services.stack.rundir import RunDirectory
from shared import subjects
from shared.messages.recordings import RecordedEvent
from shared.messages.reports import ServiceStatus

_DEADLINE_S = 5.0
_MOST_PAGES = 1000
FORMAT = "kvasir-recording-1"


def record(run: RunDirectory, console: Console, out: Path, *, as_trace: bool = False) -> int:
    """Write a head and one event per JSON line, or Chrome trace events. Return 0. Raise ConfigError if no
    stack runs, KvasirError if an instance stops replying."""
    head, events = recording(run)
    if as_trace:
        out.write_text(json.dumps(chrome_trace(events)))
    else:
        out.write_text("".join(json.dumps(line) + "\n" for line in (head, *events)))
    since_s = events[-1]["unix_s"] - events[0]["unix_s"] if events else 0.0
    count = len(head["instances"])
    say(console, f"{out}: {len(events)} events of {count} instances, the last {since_s:.0f} s")
    if as_trace:
        say(console, "open it in https://ui.perfetto.dev")
    return 0


def recording(run: RunDirectory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the head and all events by wall clock. Raise the errors of `record`."""
    state = running_state(run)
    found, events = asyncio.run(_everybodys(BusAccess.from_state(state, run.credentials())))
    head = {
        "format": FORMAT,
        "model": state.get("model"),
        "instances": [status.instance for status in found],
        "events": len(events),
        "setup": _setup(found),
    }
    return head, events


def _setup(found: Sequence[ServiceStatus]) -> dict[str, Any]:
    """Return settings that a replay needs."""
    told = {name: [each.details for each in found if each.service == name] for name in subjects.SERVICES}
    leader = next((each for each in told["scheduler"] if each.get("role") == "leader"), {})
    placed = next((each.get("policy") for each in told["placement"]), None) or "worst_fit"
    return {
        "rules": leader.get("rules", {}),
        "placement": placed,
        "workers": [
            {
                "worker": each.instance,
                "block_tokens": each.details["block_tokens"],
                "total_blocks": each.details["total_blocks"],
                "model": each.details["model"],
            }
            for each in found
            if each.service == "worker" and "block_tokens" in each.details
        ],
    }


async def _everybodys(access: BusAccess) -> tuple[list[ServiceStatus], list[dict[str, Any]]]:
    """Return all instances, and their events in order."""
    roll = RollCall(access.config(subjects.OPERATOR))
    events: list[dict[str, Any]] = []
    found: list[ServiceStatus] = []
    try:
        for service in subjects.SERVICES:
            for status in await roll.ask(service, deadline_s=1.0):
                found.append(status)
                events += await _remembered(roll, service, status.instance)
    finally:
        await roll.close()
    return found, sorted(events, key=lambda event: event["unix_s"])


async def _remembered(roll: RollCall, service: str, instance: str) -> list[dict[str, Any]]:
    """Return all events of an instance up to now, oldest first."""
    first = await roll.recorded(service, instance, 0, deadline_s=_DEADLINE_S)
    told, pages, until_s = first, [first], first.now_s
    while told.events and len(pages) < _MOST_PAGES and told.events[-1].at_s < until_s:
        told = await roll.recorded(service, instance, told.next_seq, deadline_s=_DEADLINE_S)
        pages.append(told)
    events = [event for page in pages for event in page.events if event.at_s <= until_s]
    return written(instance, events, first.unix_s - first.now_s)


def written(instance: str, events: Sequence[RecordedEvent], ahead_s: float) -> list[dict[str, Any]]:
    """Convert events to their file form. `ahead_s`: wall clock minus the instance's clock."""
    return [
        {
            "unix_s": event.at_s + ahead_s,
            "instance": instance,
            "kind": event.kind,
            **({"request": event.request_id} if event.request_id else {}),
            **event.fields,
        }
        for event in events
    ]
