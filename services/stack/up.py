"""`up`: start a stack, supervise it until a signal, and stop it; with `--detach`, in a session of its own."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from services.stack.access import BusAccess, certificate_for
from services.stack.config import StackConfig
from services.stack.display import StartDisplay, access_text, say
from services.stack.down import end_leftovers
from services.stack.logs import reason
from services.stack.obstructions import (
    check_settings,
    choose_nats_ports,
    choose_port,
    gateway_hosts,
    running_already,
)
from services.stack.probes import authority, http_get
from services.stack.roll_call import RollCall
from services.stack.rolling import SIGNAL as ROLL_SIGNAL
from services.stack.rolling import Roller
from services.stack.rundir import ROOT, RunDirectory
from services.stack.supervisor import ChildState, StartFailed, Supervisor, tail
from services.stack.table import Sources, TableMaker, workers_by_model
from services.stack.verdict import shortages, troubles
from shared import watchdog
from shared.errors import KvasirError
from shared.messages.moves import WorkersWanted
from shared.messages.reports import StackVerdict
from shared.subjects import OPERATOR, PLACEMENT_WANTED, STACK_VERDICT
from shared.tasks import first_ended

_TRIM_INTERVAL_S, _RESTORE_INTERVAL_S = 10.0, 1.0
_JUDGE_S = 4.0
_TOLD = 16
"""Maximum number of faults sent to gateways."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def up(
    config: StackConfig, run: RunDirectory, sources: Sources, make_table: TableMaker, console: Console
) -> int:
    """Run a stack until a signal; return the exit code. Raise ConfigError, and Obstructed if it cannot
    start."""
    run.create()
    if not run.acquire():
        raise running_already(run)
    end_leftovers(run.read_state())
    return await _Stack(
        config, run, sources, make_table, console
    ).run()  # holds the lock until the process ends


class _Stack:
    """A running stack: supervisor, display, and state on disk."""

    def __init__(
        self,
        config: StackConfig,
        run: RunDirectory,
        sources: Sources,
        make_table: TableMaker,
        console: Console,
    ) -> None:
        self._config, self._run, self._sources, self._console = config, run, sources, console
        self._port = choose_port(config.port)
        # Chosen but not bound yet, so it must be excluded here.
        first = config.nats_port or 0
        asked = {self._port, *range(first, first + config.nats_cluster)}
        operator_port = choose_port(config.operator_port, "--operator-port", asked)
        config = config.model_copy(update={"operator_port": operator_port})
        self._access = BusAccess.to(
            choose_nats_ports(config.nats_port, config.nats_cluster, self._say),
            self._run.credentials(*config.instances),
            certificate_for(config, self._run.path / "tls"),
        )
        self._roll = RollCall(self._access.config(OPERATOR))
        specs = make_table(
            config, run, port=self._port, access=self._access, sources=sources, roll=self._roll
        )
        check_settings(specs, ROOT)
        env = next((spec.env for spec in specs if spec.name.startswith("gateway-")), {})
        self._host, operator_host = gateway_hosts(env)
        self._url = f"http://{authority(self._host, self._port)}"
        self._operator_url = f"http://{authority(operator_host, operator_port)}"
        self._run.rotate_logs()
        self._copies: dict[Path, str] = {}
        self._phase = "starting"
        self._began_s, self._began_unix_s = time.monotonic(), time.time()
        self._ready_s: float | None = None
        self._model = ""
        self._supervisor = Supervisor(
            specs, cwd=ROOT, logs=self._run.logs, say=self._say, on_change=self._on_change
        )
        self._roller = Roller(
            self._supervisor, self._run, ready_s=config.start_timeout_s, grace_s=config.stop_grace_s
        )

    async def run(self) -> int:
        _raise_file_limit()
        watchdog.start(self._run.supervisor)
        beating = asyncio.create_task(watchdog.beat())
        asyncio.get_running_loop().add_signal_handler(ROLL_SIGNAL, self._roller.order)
        stop = _stop_event(on_again=self._supervisor.kill)
        try:
            self._supervisor.start()
            work, _ = await first_ended(self._start_and_watch(), stop.wait())
            if work is not None:
                work.result()  # raises why it ended
            code = 0
        except StartFailed as failure:
            self._explain(failure)
            code = 1
        finally:
            await self._end()
            beating.cancel()
        return code

    async def _start_and_watch(self) -> None:
        with StartDisplay(self._console, self._supervisor.children.values()) as display:
            await self._supervisor.until_ready(self._config.start_timeout_s, display.tick)
        self._ready_s = time.monotonic() - self._began_s
        self._model = await self._served_model()
        where = f" at {self._url}; the key is in {self._run.credentials_file}"
        if self._console.is_terminal:  # elsewhere the key would end up in logs
            key = self._access.credentials.api_key
            where = f"\n\n{access_text(self._url, key, self._model, self._run)}"
        self._say(f"ready in {self._ready_s:.1f} s{where}")
        self._set_phase("ready")  # only now, because `up --detach` shows what was said before
        beside = [asyncio.create_task(self._keep_house())]
        beside.append(asyncio.create_task(self._roller.run(self._write_state)))
        beside.append(asyncio.create_task(self._judge()))
        if self._sources.is_scaled:
            beside.append(asyncio.create_task(self._follow_placement()))
        try:
            await self._supervisor.until_broken()
        finally:
            for task in beside:
                task.cancel()

    async def _follow_placement(self) -> None:
        """Park and restart workers as placement demands, in a scaled stack."""
        from shared.bus import Listener  # slow to import, see `roll_call`

        handlers = (Listener(PLACEMENT_WANTED, WorkersWanted, "on_wanted"),)
        with contextlib.suppress(KvasirError):
            groups = workers_by_model(self._config)
            await self._roll.listen(handlers, WorkerScaling(self._supervisor, groups))

    async def _judge(self) -> None:
        """Periodically send the stack's faults to the gateways."""
        expected = Counter(
            name.rpartition("-")[0]
            for child in self._supervisor.children.values()
            for name in child.spec.instances
        )
        while True:
            with contextlib.suppress(KvasirError):
                answers = await self._roll.ask_all(expected, deadline_s=_JUDGE_S / 4)
                rows = [child.row() for child in self._supervisor.children.values()]
                found = troubles(rows, answers, time.time(), self._run.low_disk())
                verdict = StackVerdict(troubles=tuple(found[:_TOLD]), short_of=tuple(shortages(answers)))
                await self._roll.announce(STACK_VERDICT, verdict)
            await asyncio.sleep(_JUDGE_S)

    async def _keep_house(self) -> None:
        """Keep logs within bounds, write the state, and replace files that someone deleted."""
        trimmed_s = 0.0
        while True:
            await asyncio.sleep(_RESTORE_INTERVAL_S)
            self._restore()
            if not self._run.state_file.exists() or time.monotonic() - trimmed_s > _TRIM_INTERVAL_S:
                trimmed_s = time.monotonic()
                self._write_state()
                with contextlib.suppress(OSError):  # disk full; trimmed later
                    self._run.trim_logs(self._config.logs_mb * 1_000_000)

    def _restore(self) -> None:
        with contextlib.suppress(OSError):  # disk full; written later
            self._run.logs.mkdir(parents=True, exist_ok=True)
            if missing := self._run.restore(self._copies):
                self._say(f"written again, because someone deleted them: {', '.join(missing)}")
            self._run.acquire()

    def _on_change(self) -> None:
        """Write the state of the children, and what the next one to start needs."""
        self._restore()
        self._write_state()

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
        await self._supervisor.stop(self._config.stop_grace_s)
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
        with contextlib.suppress(OSError):  # without a terminal, the children must still be stopped
            say(self._console, text)

    def _set_phase(self, phase: str) -> None:
        self._phase = phase
        self._write_state()

    def _write_state(self) -> None:
        try:
            self._run.write_state(self._state())
        except OSError as error:  # a full disk must not end a running stack; `status` lags behind
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
    """Return the workers of one model to stop and to start. The last running worker is never stopped."""
    parked = [name for name in running if name in event.parked]
    needed = [name for name in running if name not in event.parked]
    able = sorted(name for name in stopped if name not in event.parked)
    started = able[: max(0, event.wanted - len(needed))]
    if not needed and not started:
        parked = parked[1:]
    return parked, started


class WorkerScaling:
    """Adjusts the number of running workers to placement's demand. Placement repeats its demand, so nothing
    is remembered here."""

    def __init__(self, supervisor: Supervisor, workers_by_model: Mapping[str, Sequence[str]]) -> None:
        """Set up scaling for worker groups by model; the empty name applies to every model."""
        self._supervisor = supervisor
        self._workers_by_model = workers_by_model

    def on_wanted(self, event: WorkersWanted) -> None:
        groups = self._workers_by_model
        group = groups.get("", ()) or groups.get(event.model, ())
        children = [child for name, child in self._supervisor.children.items() if name in group]
        running = [child.spec.name for child in children if child.wanted.is_set()]
        parked = [child.spec.name for child in children if child.state is ChildState.PARKED]
        stopped = [name for name in parked if name not in running]  # excludes workers just told to start
        to_stop, to_start = differences(event, running, stopped)
        for worker_id in to_stop:
            self._supervisor.park(worker_id)
        for worker_id in to_start:
            self._supervisor.unpark(worker_id)


def _raise_file_limit() -> None:
    """Raise the descriptor limit to the maximum, because each stream needs a descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _stop_event(on_again: Callable[[], None]) -> asyncio.Event:
    """Return an event that the first stop signal sets; the second calls `on_again`. Signals ignored at the
    start stay ignored."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            on_again()
        stop.set()

    for number in _STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop


_POLL_S = 0.05
_STOP_WAIT_S = 60.0


def up_detached(
    run: RunDirectory, module: str, argv: Sequence[str], console: Console, *, if_needed: bool = False
) -> int:
    """Run `python -m <module> <argv>` in the background. Return 0 once it is ready, else its exit code. With
    `if_needed`, accept a ready stack in this run directory. Raise Obstructed."""
    run.create()
    if run.holder() is not None:
        if if_needed and _show_running(run, console):
            return 0
        raise running_already(run)
    log_path = run.path / "supervisor.log"
    search = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # keep relative paths valid
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(search)},
        )
    try:
        ready = _await_ready(run, process, log_path, console)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=_STOP_WAIT_S)
        raise
    if not ready:
        return process.returncode or 1
    state = run.read_state()
    say(console, access_text(state["url"], run.credentials().api_key, state["model"], run))
    say(console, f"running in the background (pid {process.pid})")
    return 0


def _show_running(run: RunDirectory, console: Console) -> bool:
    """Show the running stack; return False if it is not ready."""
    state = run.read_state()
    if state.get("pid") != run.holder() or state.get("phase") != "ready":
        return False
    text = access_text(state["url"], run.credentials().api_key, state["model"], run)
    age_s, was = time.time() - state["started_unix_s"], f"was ready in {state['ready_s']:.1f} s\n\n{text}"
    say(console, f"runs already, since {age_s:.0f} s, with the code and settings of then; {was}")
    return True


def _await_ready(
    run: RunDirectory, process: subprocess.Popen[bytes], log_path: Path, console: Console
) -> bool:
    """Relay the supervisor's output until ready or ended. The supervisor has its own start timeout."""
    with log_path.open() as log:
        while True:
            ended, state = process.poll() is not None, run.read_state()
            ready = state.get("pid") == process.pid and state.get("phase") == "ready"
            for line in log.read().splitlines():
                if line.startswith("error: "):
                    print(line, file=sys.stderr)
                else:
                    say(console, line)
            if ended or ready:
                return ready and not ended
            time.sleep(_POLL_S)
