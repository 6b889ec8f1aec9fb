"""Supervisor: starts child processes together, restarts those that die, and stops all without orphans. It
knows no NATS, model or terminal. It reports through `say`, and calls `on_change` on each change."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Any

from services.stack.probes import Life, Probe, lives
from services.stack.process import ChildProcess, Launch, describe_exit, is_traced, start_program
from shared.errors import InternalError, KvasirError
from shared.tasks import first_ended
from shared.watchdog import BEAT_S, STUCK_S, Spell


@dataclass(frozen=True)
class ChildSpec:
    """Description of a child: one row of the child table."""

    name: str
    """Instance id; also names its log."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Complete environment."""
    ready: Probe = lives
    life: Life | None = None
    launch: Launch = start_program
    stage: int = 0
    """Higher stages are stopped first; all are started together."""
    instances: tuple[str, ...] = ()
    """Service instances in the process, if not just `name`."""


class ChildState(StrEnum):
    """State of a child, as shown by `status`."""

    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing off"
    PARKED = "parked"
    """Stopped because it is not needed; restarted on demand."""
    STOPPED = "stopped"


@dataclass
class Backoff:
    """Delay before a dead child is restarted. It doubles with every death, from `first_s` to `longest_s`. A
    child that lived for `stable_s` starts over at `first_s`."""

    first_s: float = 0.1
    longest_s: float = 10.0
    stable_s: float = 10.0
    failures: int = 0
    """Consecutive deaths within `stable_s` of the start."""

    def on_exit(self, lived_s: float) -> float:
        """Return the delay in seconds after a child that lived for `lived_s`."""
        if lived_s >= self.stable_s:
            self.failures = 0
        self.failures += 1
        return min(self.longest_s, self.first_s * 2.0 ** min(self.failures - 1, 30))


_KEPT_CRASHES = 64


@dataclass
class Child:
    """A child across all restarts of its process."""

    spec: ChildSpec
    backoff: Backoff
    state: ChildState = ChildState.STARTING
    process: ChildProcess | None = None
    restarts: int = 0
    last_exit: str | None = None
    crashed_unix_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_CRASHES))
    """Times of unexpected deaths, latest last."""
    obstacle: str | None = None
    took_s: float | None = None
    """Time from the start of the current process until it was ready."""
    started_unix_s: float = field(default_factory=time.time)
    """For display, and to identify the process later."""
    started_s: float = field(default_factory=time.monotonic)
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared: stop it and keep it stopped."""
    code: Path | None = None
    """Folder to start it from, if not the supervisor's."""
    is_rolling: bool = False
    """True while it is stopped for an immediate restart."""
    renewals: int = 0
    """Number of such restarts."""
    account: dict[str, Any] | None = None
    """What the current process last answered."""
    silence: Spell = field(default_factory=Spell)
    hung: str = ""
    """Why the current process was killed."""

    def __post_init__(self) -> None:
        self.wanted.set()

    def row(self) -> dict[str, Any]:
        """Return the row for state.json and the status table."""
        return {
            "name": self.spec.name,
            "instances": list(self.spec.instances or (self.spec.name,)),
            "pid": self.process.pid if self.process else None,
            "state": str(self.state),
            "restarts": self.restarts,
            "renewals": self.renewals,
            "last_exit": self.last_exit,
            "crashed_unix_s": [round(at_s, 3) for at_s in self.crashed_unix_s],
            "took_s": round(self.took_s, 2) if self.took_s is not None else None,
            "started_unix_s": round(self.started_unix_s, 3),
            "account": self.account or {},
            "silent_s": round(self.silence.lasting_s, 1),
        }


START_FAILURES = 3
"""Consecutive deaths of one child after which the start is aborted."""
COMPLAIN_FAILURES = 5
"""Consecutive deaths in a ready stack after which the reason is shown; restarts go on."""
CONFIG_EXIT_CODE = 2
"""Exit code of a service with invalid configuration; a retry is pointless."""
STARTING_STUCK_S = 60.0
"""Time without an answer after which a process is replaced that is not ready: loading may hold the GIL."""
_ANSWER_S = _SILENT_BEAT_S = 0.25  # silent processes are asked more often
_SILENT_S = STUCK_S - BEAT_S  # measured; the last answer came up to a beat before
_PROBE_S = 0.05
_KILL_WAIT_S = 5.0


class StartFailed(KvasirError):
    """The stack did not become ready; `children` are the likely culprits."""

    code = "start_failed"

    def __init__(self, message: str, children: Sequence[str]) -> None:
        super().__init__(message)
        self.children = tuple(children)


class Supervisor:
    """Keeps the children of one table running until stopped."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        cwd: Path,
        logs: Path,
        say: Callable[[str], None],
        on_change: Callable[[], None] = lambda: None,
        new_backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        self.children = {spec.name: Child(spec, new_backoff()) for spec in specs}
        self._cwd = cwd
        self._logs = logs
        self._say = say
        self._on_change = on_change
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._starting = True
        self._failure: StartFailed | None = None

    def log_path(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def start(self) -> None:
        """Start every child; return at once."""
        for name, child in self.children.items():
            self._keepers[name] = asyncio.create_task(self._keep(child), name=f"keep {name}")
        self._watcher = asyncio.create_task(self._watch(), name="watch readiness and progress")

    async def until_ready(self, timeout_s: float, on_tick: Callable[[], None] = lambda: None) -> None:
        """Wait until all children are ready. Raise StartFailed if one keeps dying, or after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while unready := [one for one in self.children.values() if one.state is not ChildState.READY]:
            self._raise_failures()
            if time.monotonic() > deadline_s:
                why = ", ".join(f"{c.spec.name} ({c.obstacle or c.state})" for c in unready)
                names = [child.spec.name for child in unready]
                raise StartFailed(f"not ready after {timeout_s:g} s: {why}", names)
            on_tick()
            await asyncio.sleep(_PROBE_S)
        self._starting = False

    def park(self, name: str) -> None:
        """Stop the child until `unpark`. Idempotent."""
        child = self.children[name]
        if child.wanted.is_set():
            child.wanted.clear()
            self._say(f"{name} is not needed; stopping it")
            if child.process is not None:
                child.process.terminate()

    def unpark(self, name: str) -> None:
        """Restart a parked child."""
        child = self.children[name]
        if not child.wanted.is_set():
            self._say(f"{name} is needed; starting it")
            child.wanted.set()

    async def renew(self, name: str, code: Path, *, ready_s: float, grace_s: float) -> None:
        """Restart the child from folder `code`, and wait until it is ready. A parked child uses that folder
        when it is needed. Raise StartFailed after `ready_s`, and restart it from the previous folder."""
        child = self.children[name]
        before, child.code = child.code, code
        if await self._renewed(child, ready_s, grace_s):
            return
        child.code = before
        why = child.obstacle or child.last_exit or str(child.state)
        await self._renewed(child, ready_s, grace_s)
        raise StartFailed(f"{name} did not become ready from {code}: {why}", [name])

    async def _renewed(self, child: Child, ready_s: float, grace_s: float) -> bool:
        """Return True if it became ready in time; parked children count as ready."""
        if not child.wanted.is_set():
            return True
        process, renewals = child.process, child.renewals
        child.backoff.failures = 0
        if process is not None:
            child.is_rolling = True
            process.terminate()
            if not await self._holds(lambda: child.renewals > renewals, grace_s):
                self._say(f"{child.spec.name} did not end within {grace_s:g} s; killing it")
                process.kill()

        def is_over() -> bool:
            is_ready = child.state is ChildState.READY and child.process not in (None, process)
            return is_ready or child.backoff.failures >= START_FAILURES or self._stopping.is_set()

        return await self._holds(is_over, ready_s) and child.state is ChildState.READY

    async def _holds(self, condition: Callable[[], bool], within_s: float) -> bool:
        until_s = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > until_s:
                return False
            await asyncio.sleep(_PROBE_S)
        return True

    async def until_broken(self) -> None:
        """Wait until one of the supervisor's own tasks ends, and raise its error."""
        await asyncio.wait(self._tasks(), return_when=asyncio.FIRST_COMPLETED)
        self._raise_failures()
        raise InternalError("the supervisor lost a task")

    async def stop(self, grace_s: float) -> None:
        """Stop every child, higher stages first: SIGTERM, then SIGKILL after `grace_s`."""
        self._stopping.set()
        by_stage = sorted(self.children.values(), key=lambda child: -child.spec.stage)
        for _, group in groupby(by_stage, key=lambda child: child.spec.stage):
            await self._stop_stage(list(group), grace_s)
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])

    def kill(self) -> None:
        """Kill every child at once."""
        self._stopping.set()
        for child in self.children.values():
            if child.process is not None:
                child.process.kill()

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [*self._keepers.values(), *([self._watcher] if self._watcher else [])]

    def _raise_failures(self) -> None:
        if self._failure is not None:
            raise self._failure
        for task in self._tasks():
            if task.done():
                task.result()

    async def _watch(self) -> None:
        """Probe running children: whether they become ready, and, less often, whether they hang."""
        asked_s = 0.0
        while True:
            running = [child for child in self.children.values() if child.process]
            starting = [child for child in running if child.state is ChildState.STARTING]
            works = [self._probe(child) for child in starting]
            beat_s = _SILENT_BEAT_S if any(child.silence.is_lasting for child in running) else BEAT_S
            if time.monotonic() - asked_s > beat_s:
                asked_s = time.monotonic()
                works += [self._ask(child) for child in running]
            await asyncio.gather(*works)
            await asyncio.sleep(_PROBE_S)

    async def _probe(self, child: Child) -> None:
        probed = child.process
        obstacle = await child.spec.ready(time.monotonic() - child.started_s)
        if child.process is not probed or child.state is not ChildState.STARTING:
            return
        child.obstacle = obstacle
        if obstacle is None:
            child.took_s = time.monotonic() - child.started_s
            self._set(child, ChildState.READY)

    async def _ask(self, child: Child) -> None:
        """Ask the child for its account. Time counts only while it could have answered."""
        process, ask, account = child.process, child.spec.life, None
        if process is None or ask is None:
            return
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(_ANSWER_S):
                account = await ask(process.pid)
        if child.process is not process or (account is None and child.account is None):
            return
        stuck = "" if account is None else account.get("stuck", "")
        if (account is None or stuck) and is_traced(process.pid):
            account, stuck = account or child.account, ""
        silent_s = child.silence.look(process.pid, is_new=account is not None)
        child.account = child.account if account is None else account
        if silent_s >= (_SILENT_S if child.state is ChildState.READY else STARTING_STUCK_S):
            stuck = f"no answer for {silent_s:.0f} s"
        if stuck and not child.hung and child.wanted.is_set() and not self._stopping.is_set():
            child.hung = f"hung: {stuck}"
            self._say(f"{child.spec.name} hangs ({stuck}); killing it")
            process.kill()
        if account is None:
            self._on_change()

    def _set(self, child: Child, state: ChildState) -> None:
        child.state = state
        self._on_change()

    async def _keep(self, child: Child) -> None:
        """Run the child until the supervisor stops."""
        while not self._stopping.is_set():
            began_s = time.monotonic()
            status = await self._run_once(child)
            if self._stopping.is_set():
                break
            if not child.wanted.is_set():
                await self._until_wanted(child)
                continue
            if child.is_rolling:
                child.is_rolling = False
                child.renewals += 1
                self._set(child, ChildState.STARTING)
                continue
            lived_s = time.monotonic() - began_s
            delay_s = child.backoff.on_exit(lived_s)
            child.restarts += 1
            child.crashed_unix_s.append(time.time())
            self._complain(child, status, lived_s, delay_s)
            self._set(child, ChildState.BACKING_OFF)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
        self._set(child, ChildState.STOPPED)

    async def _until_wanted(self, child: Child) -> None:
        """Park until the child is needed or the supervisor stops."""
        self._set(child, ChildState.PARKED)
        await first_ended(child.wanted.wait(), self._stopping.wait())

    async def _run_once(self, child: Child) -> int:
        spec = child.spec
        child.started_unix_s, child.started_s, child.took_s = time.time(), time.monotonic(), None
        child.account, child.silence, child.hung = None, Spell(), ""
        try:
            child.process = await self._launched(spec, child.code or self._cwd)
        except OSError as error:
            child.last_exit = str(error)
            return CONFIG_EXIT_CODE
        if child.process is None:
            return 0
        if self._stopping.is_set():
            child.process.kill()
        self._set(child, ChildState.STARTING)
        status = await child.process.wait()
        child.process = None
        child.last_exit = child.hung or describe_exit(status)
        return status

    async def _launched(self, spec: ChildSpec, code: Path) -> ChildProcess | None:
        """Launch the process; return None if the supervisor stops first. Raise OSError."""
        launching = spec.launch(spec.argv, spec.env, code, self.log_path(spec.name))
        launched, _ = await first_ended(launching, self._stopping.wait())
        return launched.result() if launched else None

    def _complain(self, child: Child, status: int, lived_s: float, delay_s: float) -> None:
        name, failures = child.spec.name, child.backoff.failures
        what = f"{name} ended after {lived_s:.1f} s ({child.last_exit})"
        if self._starting and (failures >= START_FAILURES or status == CONFIG_EXIT_CODE):
            often = f", {failures} times in a row" if failures > 1 else ""
            self._failure = self._failure or StartFailed(what + often, [name])
            return
        self._say(f"{what}; starting it again in {delay_s:g} s")
        if failures == COMPLAIN_FAILURES:
            log = self.log_path(name)
            self._say(f"{name} keeps ending; the last lines of {log}:\n{tail(log)}")

    async def _stop_stage(self, children: list[Child], grace_s: float) -> None:
        for child in children:
            if child.process is not None:
                child.process.terminate()
        keepers = [self._keepers[c.spec.name] for c in children if c.spec.name in self._keepers]
        if not keepers:
            return
        _, late = await asyncio.wait(keepers, timeout=grace_s)
        for child in children:
            if child.process is not None:
                self._say(f"{child.spec.name} did not end within {grace_s:g} s; killing it")
                child.process.kill()
        if late:
            await asyncio.wait(late, timeout=_KILL_WAIT_S)


def tail(path: Path, lines: int = 15, max_bytes: int = 16_384) -> str:
    """Return the last lines of a log, indented, or a note if there are none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - max_bytes))
            last = file.read().decode("utf-8", "replace").splitlines()[-lines:]
    except OSError:
        last = []
    return "\n".join(f"    {line}" for line in last) or "    (empty)"
