"""Servers under test on this machine: our stack, started the same way by all benches, and any peer.

A `Server` is one side of a comparison. A `Stack` is our server; it also reports its CPU use and gives access
to its bus. Both end with their `with` block.
"""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil

from bench.kit.cores import Cores
from bench.kit.load import Target, answers
from bench.kit.models import TINY_CHAT
from bench.kit.processes import ProcessTree
from bench.kit.provenance import ROOT
from services.stack.access import BusAccess
from services.stack.obstructions import free_port
from services.stack.rundir import RunDirectory
from shared.bus import Bus, Handler
from shared.errors import InternalError

Settings = Mapping[str, object]
"""Settings of a stack, by `section.name`."""

OFF: Settings = {
    "worker.prefix_cache.enabled": False,
    "worker.lending.lend": False,
    "worker.lending.borrow": False,
    "scheduler.relief": False,
    "worker.pie.enabled": False,
}
"""Evicted sequences are recomputed, and requests larger than a worker are refused."""
CACHE: Settings = {"worker.prefix_cache.enabled": True}
"""Prefix cache with a tier on the host."""
LENDING: Settings = {"worker.lending.lend": True, "worker.lending.borrow": True}
RELIEF: Settings = {"scheduler.relief": True}
"""Relief ladder: sequences are migrated, paused or, with a cache, swapped."""
PIE: Settings = {"worker.pie.enabled": True}
"""Blocks are swapped to the worker's host memory during the computation."""
PLAIN: Settings = {"worker.threads": 1, "worker.prefix_cache.enabled": False, "scheduler.policy": "vllm"}
"""Settings for a comparison with another engine or server: one thread, no prefix cache."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
START_S = 240.0
_STATUS_S = 30.0


@dataclass(frozen=True)
class Server:
    """One side of a comparison: an HTTP server that answers."""

    name: str
    tree: ProcessTree
    target: Target
    engine: str = ""
    """Start of the name of the process whose busiest thread is the engine."""
    describes: Mapping[str, object] = field(default_factory=dict)
    """Attributes of this side in the record of the run."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.tree.end()


AnyServer = TypeVar("AnyServer", bound=Server)


def started(server: AnyServer, path: str = "/health", within_s: float = START_S) -> AnyServer:
    """Return the server once a GET of `path` succeeds. Ends it and raises InternalError if it does not
    start."""
    try:
        server.tree.await_(lambda: answers(server.target, path), within_s)
    except BaseException:
        server.tree.end()
        raise
    return server


def start_all(starts: Sequence[Callable[[], Server]], running: ExitStack) -> list[Server]:
    """Start servers in parallel. `running` ends them, also if another one failed to start."""
    servers: list[Server] = []
    failed: list[Exception] = []
    with ThreadPoolExecutor(len(starts)) as pool:
        for future in [pool.submit(start) for start in starts]:
            try:
                servers.append(running.enter_context(future.result()))
            except Exception as error:
                failed.append(error)
    if failed:
        raise failed[0]
    return servers


@dataclass(frozen=True)
class Stack(Server):
    """A running stack of ours."""

    run_dir: Path = Path()

    def confine(self, cores: Cores) -> None:
        """Bind its worker to the engine's core (`worker.cores`) and everything else to the other core."""
        self.tree.bind(self.tree.threads_of(self.engine), {cores.engine}, {cores.rest})

    def process(self, name: str) -> psutil.Process:
        """Return the process of a service. Raises InternalError if there is none."""
        try:
            return psutil.Process(self.pids()[name])
        except KeyError:
            raise InternalError(f"the stack has no {name}") from None

    def cpu_s(self) -> dict[str, float]:
        """Return CPU seconds by child, with a worker's engine separate from the rest of it."""
        used: dict[str, float] = {}
        for name, pid in self.pids().items():
            for thread in psutil.Process(pid).threads():
                is_engine = name.startswith("worker-") and thread.id != pid
                part = f"{name} engine" if is_engine else name
                used[part] = used.get(part, 0.0) + thread.user_time + thread.system_time
        return used

    def details(self, key: str) -> dict[str, Any]:
        """Return the part of the stack's status that has `key`. Raises InternalError if there is none."""
        details = _find(self._status(), key)
        if details is None:
            raise InternalError(f"the stack's status does not tell {key}")
        return details

    def until(self, ready: Callable[[], object], within_s: float) -> None:
        """Wait until `ready()` is true; a process or a status that is missing counts as false. Raises
        InternalError on a timeout."""

        def is_ready() -> bool:
            try:
                return bool(ready())
            except (psutil.NoSuchProcess, InternalError):
                return False

        self.tree.await_(is_ready, within_s)

    def services(self) -> list[dict[str, Any]]:
        """Return the status of every service instance. Raises InternalError if the stack does not respond."""
        return list(self._status()["services"])

    def _status(self) -> dict[str, Any]:
        argv = [sys.executable, "-m", "services", "status", "--json", "--run-dir", str(self.run_dir)]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=_STATUS_S, check=False)
        if done.returncode != 0:
            raise InternalError(f"the stack does not tell its status: {(done.stderr or done.stdout)[-300:]}")
        return dict(json.loads(done.stdout))

    def pids(self) -> dict[str, int]:
        """Return the pids of running processes, by name."""
        return {name: pid for name, pid in self._children().items() if pid}

    def is_whole(self) -> bool:
        """Whether all processes run, and none is stopped by a signal."""
        try:
            states = [psutil.Process(pid).status() for pid in self._children().values() if pid]
            return all(self._children().values()) and psutil.STATUS_STOPPED not in states
        except FileNotFoundError:  # Its files were deleted a moment ago.
            return False

    def _children(self) -> dict[str, int | None]:
        state = json.loads((self.run_dir / "state.json").read_text())
        return {child["name"]: child["pid"] for child in state["children"]}


def start_stack(
    run_dir: Path,
    settings: Mapping[str, object],
    *,
    name: str = "kvasir",
    model: Path = TINY_CHAT,
    workers: int = 1,
    gateways: int = 1,
    environ: Mapping[str, str] = ONE_THREAD,
    refuses: bool = False,
    within_s: float = START_S,
) -> Stack:
    """Start `python -m services up` on free ports and wait until ready; its log lies beside `run_dir`.

    It inherits the caller's cores, so bind the client afterwards. With `refuses`, requests that would wait
    long are refused, our default; otherwise they wait, as in other servers. Raises InternalError if it does
    not start.
    """
    settings = settings if refuses else {"scheduler.refuse_wait_s": 0, **settings}
    port = free_port()
    argv = [sys.executable, "-m", "services", "up", "--run-dir", str(run_dir), "--port", str(port)]
    argv += ["--nats-port", str(free_port()), "--workers", str(workers), "--model", f"{model.name}={model}"]
    argv += ["--gateways", str(gateways)] if gateways > 1 else []
    for key, value in settings.items():
        argv += ["--set", f"{key}={value if isinstance(value, str | Path) else json.dumps(value)}"]
    log = run_dir.with_name(f"{run_dir.name}.log")
    tree = ProcessTree(name, argv, {**os.environ, **environ}, log, ROOT)
    started(Server(name, tree, Target(port, model.name)), "/ready", within_s)
    target = Target(port, model.name, RunDirectory(run_dir).credentials().api_key)
    return Stack(name, tree, target, "worker-0", settings, run_dir)


@asynccontextmanager
async def on_bus(
    run_dir: Path, user: str, handlers: Sequence[Handler] = (), listener: object = None
) -> AsyncIterator[Bus]:
    """Connect to the bus of the stack in `run_dir` with the rights of the service `user`.

    `listener` receives the messages that `handlers` name.
    """
    run = RunDirectory(run_dir)
    access = BusAccess.from_state(run.read_state(), run.credentials())
    bus = await Bus.connect(access.config(user), service=user.partition("-")[0], instance="bench-0")
    try:
        if listener is not None:
            await bus.attach(handlers, listener)
        yield bus
    finally:
        await bus.close()


def _find(document: object, key: str) -> dict[str, Any] | None:
    """Return the object in a JSON document, at any depth, that has `key`."""
    if isinstance(document, dict):
        if key in document:
            return document
        document = list(document.values())
    if isinstance(document, list):
        return next((found for one in document if (found := _find(one, key)) is not None), None)
    return None
