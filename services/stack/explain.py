"""`explain`: show where the time of a request went, as the gateway computes it from recorded events."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from rich.console import Console

from services.stack.display import running_state, say, table
from services.stack.record import recording
from services.stack.rundir import ROOT, RunDirectory
from shared.errors import ConfigError, NoResponder

_DEADLINE_S = 30.0
_REPLAY_S = 120.0
_QUIET = {"unix_s", "instance", "kind"}


def explain(
    run: RunDirectory,
    console: Console,
    request_id: str,
    *,
    with_events: bool = False,
    as_json: bool = False,
    otherwise: Sequence[str] | None = None,
) -> int:
    """Return 0 if the request is recorded, else 1. `otherwise` lists policies, or `+N` workers, to replay the
    recorded run with; if empty, another policy and one more worker. Raise ConfigError if no stack runs or the
    replay fails, NoResponder if the gateway does not reply."""
    told = _ask(f"{running_state(run)['operator_url']}/ui/requests/{request_id}")
    if otherwise is not None and told["events"]:
        told["what_if"] = what_if(run, request_id, otherwise)
    if as_json:
        say(console, json.dumps(told, indent=1))
    elif not told["events"]:
        say(console, f"nobody remembers {request_id}: it is too long ago, or never was")
    else:
        _show(console, told, with_events=with_events)
    return 0 if told["events"] else 1


def what_if(run: RunDirectory, request_id: str, otherwise: Sequence[str]) -> dict[str, Any]:
    """Replay the recorded run in the simulator, in a process of its own."""
    head, events = recording(run)
    present = head["setup"]["rules"].get("policy")
    wanted = otherwise or ("kvasir" if present == "ecoserve" else "ecoserve", "+1")
    flags = []
    for each in wanted:
        flags += ["--more-workers", each[1:]] if each.startswith("+") else ["--policy", each]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "recording.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in (head, *events)))
        command = [sys.executable, "-m", "sim.replay", str(path), "--request", request_id, *flags]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=_REPLAY_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"the simulator took more than {_REPLAY_S:.0f} s over this run") from None
    if done.returncode:
        raise ConfigError((done.stderr.strip() or "the simulator gave no answer").splitlines()[-1])
    return {**json.loads(done.stdout), "workers": len(head["setup"]["workers"])}


def in_words(told: Mapping[str, Any]) -> str:
    """Describe the replays in one sentence."""
    parts = []
    for each in told["what_if"]:
        more = each["workers"] - told["workers"]
        setting = each["policy"] if not more else "one more worker" if more == 1 else f"{more} more workers"
        later_s = each["later_s"]
        parts.append(f"with {setting} {abs(later_s):.2f} s {'later' if later_s > 0 else 'earlier'}")
    agreed = told["agreement"]["same_batches"]
    return (
        f"it would have ended {', '.join(parts)} (the simulator repeats {agreed:.0%} of who ran beside whom)"
    )


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
        console.print(table(["share", "time", "cause", ""], rows, right=("share", "time")))
    if "what_if" in told:
        say(console, in_words(told["what_if"]))
    if with_events:
        began_s = told["events"][0]["unix_s"]
        rows = [
            [f"{event['unix_s'] - began_s:8.3f}", event["instance"], event["kind"], _fields(event)]
            for event in told["events"]
        ]
        console.print(table(["after s", "where", "what", ""], rows))


def _fields(event: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in event.items() if name not in _QUIET)
