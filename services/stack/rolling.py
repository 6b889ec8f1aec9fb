"""`roll`: restart all processes one by one while the stack serves, optionally from other code.

The command writes an order to the run directory and signals the supervisor. Its `Roller` carries it out,
records progress in the state, and stops at the first process that does not become ready. That process
restarts from its previous code, so the stack stays whole. The supervisor is not restarted; nats-server only
if named.
"""

import asyncio
import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from services.stack.display import command_line, nothing_runs, say
from services.stack.rundir import ROOT, RunDirectory, read_object
from services.stack.supervisor import StartFailed, Supervisor
from shared import subjects
from shared.errors import ConfigError
from shared.key_file import write_private

SIGNAL = signal.SIGUSR1
_SETTLE_S = 1.5
"""Pause between restarts, so that peers notice and a new scheduler takes over."""
_POLL_S = 0.1
_TAKEN_UP_S = 10.0
_ORDER = ("predictor", "ledger", "placement", "scheduler", "worker", "gateway")
_SEED = "seed"
"""Process from which services are forked. It holds their code, so it goes first."""


def rolled_names(children: Sequence[str], names: Sequence[str] = ()) -> list[str]:
    """Return the processes to restart, in order: those in `names`, or all except nats-server. Raise
    ConfigError for an unknown name."""
    services = {child: child.rpartition("-")[0] or child for child in children}
    unknown = [name for name in names if name not in {*services, *services.values()}]
    if unknown:
        raise ConfigError(f"nothing here is called {unknown[0]!r}; there are {', '.join(sorted(services))}")
    chosen = [child for child in children if not names or {child, services[child]} & set(names)]
    if not names:
        chosen = [child for child in chosen if services[child] != "nats"]
    elif _SEED in children and any(services[child] in subjects.SERVICES for child in chosen):
        chosen.append(_SEED)

    def place(child: str) -> int:
        service = services[child]
        return _ORDER.index(service) if service in _ORDER else -1

    return sorted(dict.fromkeys(chosen), key=place)


class Roller:
    """Executes orders in the supervisor, one at a time."""

    def __init__(self, supervisor: Supervisor, run: RunDirectory, *, ready_s: float, grace_s: float) -> None:
        self._supervisor, self._run = supervisor, run
        self._ready_s, self._grace_s = ready_s, grace_s
        self._ordered = asyncio.Event()
        self.state: dict[str, Any] = {}
        """Progress of the last order, for the supervisor's state."""

    def order(self) -> None:
        """Announce an order in the run directory; it waits for the current one."""
        self._ordered.set()

    async def run(self, on_change: Callable[[], None]) -> None:
        """Execute orders until cancelled."""
        while True:
            await self._ordered.wait()
            self._ordered.clear()
            order = read_object(self._run.roll_file)
            self.state = {"id": order.get("id"), "phase": "rolling", "now": "", "done": [], "error": ""}
            try:
                names = rolled_names(list(self._supervisor.children), order.get("names") or ())
                for name in names:
                    self.state["now"] = name
                    on_change()
                    await self._supervisor.renew(
                        name, Path(order["code"]), ready_s=self._ready_s, grace_s=self._grace_s
                    )
                    self.state["done"].append(name)
                    if name.rpartition("-")[0] in subjects.SERVICES:
                        await asyncio.sleep(_SETTLE_S)
                self.state |= {"phase": "done", "now": ""}
            except (StartFailed, ConfigError, LookupError, TypeError) as error:
                self.state |= {"phase": "failed", "error": str(error)}
            on_change()


def roll(run: RunDirectory, console: Console, names: Sequence[str], code: Path | None) -> int:
    """Run the command; return 0 when all have restarted. Raise ConfigError if that is impossible."""
    folder = (code or ROOT).resolve()
    if not (folder / "services" / "__main__.py").is_file():
        raise ConfigError(f"{folder} has no code of Kvasir: name the folder of a checkout with --code")
    pid, state = run.holder(), run.read_state()
    if pid is None or state.get("pid") != pid:
        say(console, nothing_runs(run))
        return 1
    if "roll" not in state:
        raise ConfigError(
            f"this stack was started by code that cannot roll: {command_line('down', run)}, then up"
        )
    rolled_names([child["name"] for child in state["children"]], names)
    if (state["roll"] or {}).get("phase") == "rolling":
        raise ConfigError("it rolls already: wait until that is over")
    name, began_s = secrets.token_hex(8), time.monotonic()
    write_private(run.roll_file, json.dumps({"id": name, "names": list(names), "code": str(folder)}))
    os.kill(pid, SIGNAL)
    told: dict[str, Any] = {}
    shown = 0
    while told.get("phase") in (None, "rolling"):
        if run.holder() != pid:
            say(console, "error: the supervisor is gone")
            return 1
        found = run.read_state().get("roll") or {}
        told = found if found.get("id") == name else {}
        for done in told.get("done", [])[shown:]:
            say(console, f"{done} runs again")
            shown += 1
        if not told and time.monotonic() - began_s > _TAKEN_UP_S:
            say(console, "error: the supervisor does not take it up")
            return 1
        time.sleep(_POLL_S)
    if told["phase"] == "failed":
        say(console, f"error: {told['error']}; it runs from what it had before, and the rest was left alone")
        return 1
    say(console, f"{shown} processes in {time.monotonic() - began_s:.1f} s, from {folder}")
    return 0
