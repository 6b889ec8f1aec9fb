"""`up`: one stack from an empty run directory to ready, and down again when a signal says so."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from services.stack.access import BusAccess, certificate_for
from services.stack.config import StackConfig
from services.stack.display import StartDisplay, ready_text, say
from services.stack.down import end_leftovers
from services.stack.logs import reason
from services.stack.obstructions import (
    check_settings,
    choose_nats_port,
    choose_port,
    gateway_hosts,
    running_already,
)
from services.stack.probes import authority, http_get
from services.stack.roll_call import RollCall
from services.stack.rolling import SIGNAL as ROLL_SIGNAL
from services.stack.rolling import Roller
from services.stack.rundir import RunDirectory
from services.stack.supervisor import ChildState, StartFailed, Supervisor, tail
from services.stack.table import ROOT, TableMaker, is_scaled, kvasir_table, workers_by_model
from services.stack.verdict import troubles
from shared.errors import KvasirError
from shared.messages.moves import WorkersWanted
from shared.messages.reports import StackVerdict
from shared.subjects import OPERATOR, PLACEMENT_WANTED, STACK_VERDICT

_TRIM_INTERVAL_S = 10.0
_JUDGE_S = 4.0
_TOLD = 16
"""Troubles that gateways are told at most."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class UpOptions:
    """What the command line asked for of `up`."""

    config: StackConfig
    run: RunDirectory
    config_file: Path | None
    overrides: tuple[tuple[str, str, str], ...]
    make_table: TableMaker = kvasir_table


async def up(options: UpOptions, console: Console) -> int:
    """Runs a stack until a signal; returns the exit code. Raises ConfigError, and Obstructed when it cannot
    start."""
    run = options.run
    run.create()
    if not run.acquire():
        raise running_already(run)
    end_leftovers(run.read_state())
    return await _Stack(options, console).run()  # the lock is this process's until it ends


class _Stack:
    """A stack from its start to its end: the supervisor, what is shown of it, and its state on disk."""

    def __init__(self, options: UpOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._run = options.run
        config = options.config
        self._port = choose_port(config.port)
        # Asked for and not listened on yet: two of them would be one.
        asked = {self._port, config.nats_port or 0}
        operator_port = choose_port(config.operator_port, "--operator-port", asked)
        config = config.model_copy(update={"operator_port": operator_port})
        self._access = BusAccess.to_local(
            choose_nats_port(config.nats_port, self._say),
            self._run.credentials(*config.instances),
            certificate_for(config, self._run.path / "tls"),
        )
        self._roll = RollCall(self._access.config(OPERATOR))
        specs = options.make_table(
            config,
            self._run,
            port=self._port,
            access=self._access,
            config_file=options.config_file,
            overrides=options.overrides,
            environ=os.environ,
            roll=self._roll,
        )
        check_settings(specs, ROOT)
        env = next((spec.env for spec in specs if spec.name.startswith("gateway-")), {})
        self._host, operator_host = gateway_hosts(env)
        self._url = f"http://{authority(self._host, self._port)}"
        self._operator_url = f"http://{authority(operator_host, operator_port)}"
        self._run.rotate_logs()
        self._phase = "starting"
        self._began_s, self._began_unix_s = time.monotonic(), time.time()
        self._ready_s: float | None = None
        self._model = ""
        self._supervisor = Supervisor(
            specs, cwd=ROOT, logs=self._run.logs, say=self._say, on_change=self._write_state
        )
        self._roller = Roller(
            self._supervisor, self._run, ready_s=config.start_timeout_s, grace_s=config.stop_grace_s
        )

    async def run(self) -> int:
        _raise_file_limit()
        asyncio.get_running_loop().add_signal_handler(ROLL_SIGNAL, self._roller.order)
        stop = _stop_event(on_again=self._supervisor.kill)
        try:
            self._supervisor.start()
            code = await _first(stop, self._start_and_watch())
        except StartFailed as failure:
            self._explain(failure)
            code = 1
        finally:
            await self._end()
        return code

    async def _start_and_watch(self) -> None:
        with StartDisplay(self._console, self._supervisor.children.values()) as display:
            await self._supervisor.until_ready(self._options.config.start_timeout_s, display.tick)
        self._ready_s = time.monotonic() - self._began_s
        self._model = await self._served_model()
        self._say(self._ready_text(self._ready_s))
        self._set_phase("ready")  # only now: `up --detach` shows what was said until then
        beside = [asyncio.create_task(self._trim_logs())]
        beside.append(asyncio.create_task(self._roller.run(self._write_state)))
        beside.append(asyncio.create_task(self._judge()))
        options = self._options
        if is_scaled(options.config_file, options.overrides, os.environ):
            beside.append(asyncio.create_task(self._follow_placement()))
        try:
            await self._supervisor.until_broken()
        finally:
            for task in beside:
                task.cancel()

    def _ready_text(self, ready_s: float) -> str:
        """The key is shown to a person: what is no terminal is somebody's log."""
        if self._console.is_terminal:
            return ready_text(self._url, self._access.credentials.api_key, self._model, ready_s, self._run)
        return f"ready in {ready_s:.1f} s at {self._url}; the key is in {self._run.credentials_file}"

    async def _follow_placement(self) -> None:
        """Workers are stopped and started as placement wants it: for a stack that is scaled."""
        from shared.bus import (
            Listener,  # which takes longer to import than the rest of a start: see `roll_call`
        )

        handlers = (Listener(PLACEMENT_WANTED, WorkersWanted, "on_wanted"),)
        with contextlib.suppress(KvasirError):
            groups = workers_by_model(self._options.config)
            await self._roll.listen(handlers, WorkerScaling(self._supervisor, groups))

    async def _judge(self) -> None:
        """Tell the gateways what is wrong with the stack, again and again."""
        expected = Counter(
            name.rpartition("-")[0]
            for child in self._supervisor.children.values()
            for name in child.spec.instances
        )
        while True:
            with contextlib.suppress(KvasirError):
                answers = await self._roll.ask_all(expected, deadline_s=_JUDGE_S / 4)
                rows = [child.row() for child in self._supervisor.children.values()]
                found = troubles(rows, answers, time.time())
                await self._roll.announce(STACK_VERDICT, StackVerdict(troubles=tuple(found[:_TOLD])))
            await asyncio.sleep(_JUDGE_S)

    async def _trim_logs(self) -> None:
        while True:
            await asyncio.sleep(_TRIM_INTERVAL_S)
            with contextlib.suppress(OSError):  # a full disk; nothing to be done about it here
                self._run.trim_logs()

    async def _served_model(self) -> str:
        key = self._access.credentials.api_key
        try:
            _, body = await http_get(
                self._port, "/v1/models", (f"Authorization: Bearer {key}",), host=self._host
            )
            return str(json.loads(body)["data"][0]["id"])
        except (OSError, TimeoutError, ValueError, LookupError, TypeError):
            return "unknown"

    async def _end(self) -> None:
        self._set_phase("stopping")
        began_s = time.monotonic()
        await self._roll.close()
        await self._supervisor.stop(self._options.config.stop_grace_s)
        self._set_phase("stopped")
        self._say(
            f"stopped, {len(self._supervisor.children)} processes, in {time.monotonic() - began_s:.1f} s"
        )

    def _explain(self, failure: StartFailed) -> None:
        reasons = [reason(self._supervisor.log_path(name)) for name in failure.children]
        said = "; ".join(dict.fromkeys(filter(None, reasons)))
        self._say(f"error: the stack did not start: {failure.message}{': ' if said else ''}{said}")
        for name, why in zip(failure.children, reasons, strict=True):
            log = self._supervisor.log_path(name)
            self._say(f"more is in {log}" if why else f"the last lines of {log}:\n{tail(log)}")

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # its terminal may be gone; its children are to end all the same
            say(self._console, text)

    def _set_phase(self, phase: str) -> None:
        self._phase = phase
        self._write_state()

    def _write_state(self) -> None:
        try:
            self._run.write_state(self._state())
        except OSError as error:  # a full disk ends no stack that runs; `status` is behind for a while
            self._say(f"the state cannot be written to {self._run.path}: {error.strerror}")

    def _state(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "phase": self._phase,
            "started_unix_s": round(self._began_unix_s, 3),
            "ready_s": round(self._ready_s, 2) if self._ready_s is not None else None,
            "url": self._url,
            "operator_url": self._operator_url,
            "port": self._port,
            "model": self._model,
            **self._access.state(),
            "roll": self._roller.state,
            "children": [child.row() for child in self._supervisor.children.values()],
        }


def differences(
    event: WorkersWanted, running: Sequence[str], stopped: Sequence[str]
) -> tuple[list[str], list[str]]:
    """What to stop and what to start, of one model's workers. The last that runs is never stopped."""
    parked = [name for name in running if name in event.parked]
    needed = [name for name in running if name not in event.parked]
    able = sorted(name for name in stopped if name not in event.parked)
    started = able[: max(0, event.wanted - len(needed))]
    if not needed and not started:
        parked = parked[1:]
    return parked, started


class WorkerScaling:
    """Makes the number of a model's workers what placement wants: works off the difference each time that it
    is told.

    Placement says it again and again, so nothing has to be remembered here.
    """

    def __init__(self, supervisor: Supervisor, workers_by_model: Mapping[str, Sequence[str]]) -> None:
        """Under an empty name: of whichever model an event is."""
        self._supervisor = supervisor
        self._workers_by_model = workers_by_model

    def on_wanted(self, event: WorkersWanted) -> None:
        groups = self._workers_by_model
        group = groups.get("", ()) or groups.get(event.model, ())
        children = [child for name, child in self._supervisor.children.items() if name in group]
        running = [child.spec.name for child in children if child.wanted.is_set()]
        parked = [child.spec.name for child in children if child.state is ChildState.PARKED]
        stopped = [name for name in parked if name not in running]  # a moment ago it was told to start
        to_stop, to_start = differences(event, running, stopped)
        for worker_id in to_stop:
            self._supervisor.park(worker_id)
        for worker_id in to_start:
            self._supervisor.unpark(worker_id)


def _raise_file_limit() -> None:
    """One stream is one descriptor: use what the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _stop_event(on_again: Callable[[], None]) -> asyncio.Event:
    """Set by the first signal to stop; a second one calls `on_again`. What was ignored at the start stays
    ignored."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            on_again()
        stop.set()

    for number in _STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop


async def _first(stop: asyncio.Event, work: Any) -> int:
    """0 as soon as `stop` is set; raises what `work` raises."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return 0
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.wait({working, stopping})
