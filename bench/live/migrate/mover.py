"""Orders migrations in a running stack, as placement would, and collects their results.

It has placement's heartbeats and rights. It has no policy: running sequences move to the next worker in turn.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.kit.stacks import on_bus
from services.placement.core.move_mode import ModeChoice, MoveModes, WantedMove
from shared import subjects
from shared.bus import Bus, Handler, Listener
from shared.errors import KvasirError
from shared.messages.moves import MoveSequences, MovesTaken, SequenceMove, SequenceMoved
from shared.messages.reports import SequenceReport, SequenceState, WorkerReported
from shared.messages.sequence import SequenceKey
from shared.messages.tokens import TokenFrame

HANDLERS: tuple[Handler, ...] = (
    Listener(subjects.ANY_WORKER_REPORTED, WorkerReported, "on_reported"),
    Listener(subjects.SCHEDULER_MOVED, SequenceMoved, "on_moved"),
)
_USER = "placement-0"
_ANSWER_S = 2.0
_EPOCH_S = 0.5


class Mover:
    """Orders migrations; `outcomes` are all finished ones, in order."""

    def __init__(self, bus: Bus, choice: ModeChoice) -> None:
        self._bus = bus
        self.modes = MoveModes(choice, _EPOCH_S)
        self.reports: dict[str, WorkerReported] = {}
        self.outcomes: list[SequenceMoved] = []
        self.refusals: list[str] = []
        self._moving: set[SequenceKey] = set()

    def on_reported(self, report: WorkerReported) -> None:
        self.reports[report.worker_id] = report

    def on_moved(self, moved: SequenceMoved) -> None:
        self.outcomes.append(moved)
        self.modes.on_over(moved.ref)
        self._moving.discard(moved.ref.key)

    @property
    def done(self) -> list[SequenceMoved]:
        """Successful migrations."""
        return [moved for moved in self.outcomes if not moved.reason]

    @property
    def under_way(self) -> int:
        """Number of migrations ordered but not finished."""
        return len(self._moving)

    def running(self, *, least_generated: int = 1, least_left: int = 1) -> list[tuple[str, SequenceReport]]:
        """Return decoding sequences that are not migrating, each with its worker; fewest migrations first."""
        found = [
            (name, listed)
            for name, report in sorted(self.reports.items())
            for listed in report.sequences
            if listed.state is SequenceState.DECODING
            and listed.gateway_id
            and listed.generated_tokens >= least_generated
            and listed.max_tokens - listed.generated_tokens >= least_left
            and listed.ref.key not in self._moving
        ]
        return sorted(found, key=lambda pair: pair[1].ref.attempt)

    async def move(self, listed: SequenceReport, source: str, target: str) -> bool:
        """Order a migration in the chosen mode; return whether the scheduler accepted it."""
        tokens = listed.prompt_tokens + listed.generated_tokens
        wanted = WantedMove(SequenceMove(ref=listed.ref, target=target), source, tokens)
        now = self.modes.divide([wanted], self.reports, time.monotonic())
        if not now:
            return False
        order = MoveSequences(moves=tuple(now))
        try:
            answer = await self._bus.request(subjects.SCHEDULER_MOVE, order, MovesTaken, deadline_s=_ANSWER_S)
            (refusal,) = answer.refusals
        except KvasirError as error:
            refusal = error.message
        if refusal:
            self.refusals.append(refusal)
            self.modes.on_over(listed.ref)
            return False
        self._moving.add(listed.ref.key)
        return True

    async def move_one(self, **which: int) -> bool:
        """Migrate one running sequence to the next worker; return False if none can be migrated."""
        names = sorted(self.reports)
        for name, listed in self.running(**which):
            target = names[(names.index(name) + 1) % len(names)]
            if target != name and await self.move(listed, name, target):
                return True
        return False

    async def until_over(self, count: int, *, within_s: float) -> None:
        """Wait until `count` migrations have ended. Raises TimeoutError."""
        async with asyncio.timeout(within_s):
            while len(self.outcomes) < count:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def mover(run_dir: Path, choice: ModeChoice = "tokens") -> AsyncIterator[Mover]:
    """Yield a mover on the bus of the stack in `run_dir`."""
    async with on_bus(run_dir, _USER) as bus:
        made = Mover(bus, choice)
        await bus.attach(HANDLERS, made)
        yield made


GATEWAY = "gateway-0"
WATCH_HANDLERS: tuple[Handler, ...] = (Listener(subjects.tokens.to(GATEWAY), TokenFrame, "on_frame"),)


@dataclass(frozen=True)
class Pause:
    """The pause of one migration."""

    pause_s: float
    """From the last valid token of the old worker to the first new token of the new one."""
    step_s: float
    """Median gap between two tokens of the sequence before."""


class Watch:
    """Collects token frames."""

    def __init__(self) -> None:
        self._arrived_s: dict[tuple[str, int, int], dict[int, float]] = defaultdict(dict)
        """Time by index in the answer, by (request, choice, attempt)."""

    def on_frame(self, frame: TokenFrame) -> None:
        now_s = time.perf_counter()
        for delta in frame.deltas:
            times = self._arrived_s[delta.request_id, delta.choice, delta.attempt]
            for offset in range(len(delta.tokens)):
                times.setdefault(delta.first_index + offset, now_s)

    def pause(self, key: SequenceKey, attempt: int) -> Pause | None:
        """Return the pause after `attempt`, or None if it or the next one was not seen."""
        before, after = self._arrived_s[(*key, attempt)], self._arrived_s[(*key, attempt + 1)]
        first = next((at for at in sorted(after) if after[at] < before.get(at, math.inf)), None)
        if first is None or first - 1 not in before:
            return None
        gaps = [before[at] - before[at - 1] for at in before if at - 1 in before and at < first]
        if not gaps:
            return None
        return Pause(max(0.0, after[first] - before[first - 1]), median(gaps))


@asynccontextmanager
async def watch(run_dir: Path) -> AsyncIterator[Watch]:
    """Yield a watch on the bus of the stack in `run_dir`."""
    made = Watch()
    async with on_bus(run_dir, GATEWAY, WATCH_HANDLERS, made):
        yield made
