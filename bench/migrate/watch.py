"""Sees every token frame as the gateway does, and when: how long a reader waited at each change of workers.

A listener of its own on the gateway's subject, with the gateway's credentials. It changes nothing.
"""

import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from services.stack.access import BusAccess
from services.stack.rundir import RunDirectory
from shared import subjects
from shared.bus import Bus, Handler, Listener
from shared.messages.sequence import SequenceKey
from shared.messages.tokens import TokenFrame

GATEWAY = "gateway-0"
HANDLERS: tuple[Handler, ...] = (Listener(subjects.tokens.to(GATEWAY), TokenFrame, "on_frame"),)


@dataclass
class Seen:
    """One sequence: when each token of each attempt came."""

    arrived_s: dict[int, dict[int, float]] = field(default_factory=dict)
    """Attempt → index in the answer → time."""


@dataclass(frozen=True)
class Pause:
    """At one change of workers."""

    pause_s: float
    """From the last token of the old worker that counted to the first of the new one that was news."""
    step_s: float
    """Between two tokens of that sequence, its median before."""


class Watch:
    """Collects frames from when it is attached."""

    def __init__(self) -> None:
        self.sequences: dict[SequenceKey, Seen] = {}

    def on_frame(self, frame: TokenFrame) -> None:
        now_s = time.perf_counter()
        for delta in frame.deltas:
            seen = self.sequences.setdefault((delta.request_id, delta.choice), Seen())
            times = seen.arrived_s.setdefault(delta.attempt, {})
            for offset in range(len(delta.tokens)):
                times.setdefault(delta.first_index + offset, now_s)

    def pause(self, key: SequenceKey, attempt: int) -> Pause | None:
        """Where this attempt gave way to the next; None when either was not seen."""
        seen = self.sequences.get(key)
        if seen is None:
            return None
        before, after = seen.arrived_s.get(attempt, {}), seen.arrived_s.get(attempt + 1, {})
        first = next((at for at in sorted(after) if after[at] < before.get(at, math.inf)), None)
        if first is None or first - 1 not in before:
            return None
        gaps = [before[at] - before[at - 1] for at in before if at - 1 in before and at < first]
        if not gaps:
            return None
        return Pause(max(0.0, after[first] - before[first - 1]), median(gaps))


@asynccontextmanager
async def watch(run_dir: Path) -> AsyncIterator[Watch]:
    """On the bus of the stack that runs from there."""
    run = RunDirectory(run_dir)
    access = BusAccess.from_state(run.read_state(), run.credentials())
    bus = await Bus.connect(access.config(GATEWAY), service="gateway", instance="watch-0")
    made = Watch()
    try:
        await bus.attach(HANDLERS, made)
        yield made
    finally:
        await bus.close()
