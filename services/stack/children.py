"""What the supervisor is to run, as data, and how each of it fares."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from services.stack.launch import Launcher, ProgramLauncher
from services.stack.probes import AliveProbe, Probe
from services.stack.process import ChildProcess

_ALIVE = AliveProbe()
_PROGRAM = ProgramLauncher()


@dataclass(frozen=True)
class ChildSpec:
    """What is known of a child before it runs: one line of the child table."""

    name: str
    """Instance id; also the name of its log."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """All of its environment."""
    ready: Probe = _ALIVE
    launcher: Launcher = _PROGRAM
    stage: int = 0
    """Higher stages are stopped first; all are started together."""


class ChildState(StrEnum):
    """Where a child stands, as `status` shows it."""

    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing off"
    PARKED = "parked"
    """Ended because it is not needed; started again when it is."""
    STOPPED = "stopped"


@dataclass
class Backoff:
    """How long to wait before a child that died is started again.

    The wait doubles with every death, from `first_s` to `longest_s`. A child that lived for `stable_s` is
    believed to be well: its next death counts as the first.
    """

    first_s: float = 0.1
    longest_s: float = 10.0
    stable_s: float = 10.0
    failures: int = 0
    """Ends in a row, each within `stable_s` of its start."""

    def on_exit(self, lived_s: float) -> float:
        """Seconds to wait before the next start of a child that lived for `lived_s`."""
        if lived_s >= self.stable_s:
            self.failures = 0
        self.failures += 1
        return min(self.longest_s, self.first_s * 2.0 ** min(self.failures - 1, 30))


@dataclass
class Child:
    """A child over all its processes: it stays the same when its process is started again."""

    spec: ChildSpec
    backoff: Backoff
    state: ChildState = ChildState.STARTING
    process: ChildProcess | None = None
    restarts: int = 0
    last_exit: str | None = None
    obstacle: str | None = None
    took_s: float | None = None
    """From the start of the present process to its being ready."""
    started_unix_s: float = field(default_factory=time.time)
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Not set: it is to end, and to stay so."""

    def __post_init__(self) -> None:
        self.wanted.set()

    def row(self) -> dict[str, Any]:
        """For state.json and the status table."""
        return {
            "name": self.spec.name,
            "pid": self.process.pid if self.process else None,
            "state": str(self.state),
            "restarts": self.restarts,
            "last_exit": self.last_exit,
            "took_s": round(self.took_s, 2) if self.took_s is not None else None,
            "started_unix_s": round(self.started_unix_s, 3),
        }
