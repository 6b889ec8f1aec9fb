"""Servers of this machine that are measured: a stack of ours, started one way for all benches, and any peer.

A `Server` is one side of a comparison. A `Stack` is a server of ours, which can also be asked what it used
and be listened to on its bus. Both end with their `with` block.
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

PLAIN: Mapping[str, object] = {
    "worker.threads": 1,
    "worker.prefix_cache.enabled": False,
    "scheduler.policy": "vllm",
}
"""What a stack has that is compared with somebody else's engine or server: one thread, no prefix cache."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_START_S = 240.0
_STATUS_S = 30.0


@dataclass(frozen=True)
class Server:
    """One side of a comparison: an HTTP server that answers."""

    name: str
    tree: ProcessTree
    target: Target
    engine: str = ""
    """How the name of the process begins whose busiest thread is the engine."""
    describes: Mapping[str, object] = field(default_factory=dict)
    """What distinguishes this side in the record of the run."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.tree.end()


AnyServer = TypeVar("AnyServer", bound=Server)


def started(server: AnyServer, path: str = "/health") -> AnyServer:
    """Once it answers a GET of `path`. Ends it, and raises InternalError, when it does not."""
    try:
        server.tree.await_(lambda: answers(server.target, path), _START_S)
    except BaseException:
        server.tree.end()
        raise
    return server


def start_all(starts: Sequence[Callable[[], Server]], running: ExitStack) -> list[Server]:
    """Side by side: each takes long. `running` ends them, also those that did start when another did not."""
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
    """A stack of ours that answers."""

    run_dir: Path = Path()

    def confine(self, cores: Cores) -> None:
        """Its worker stays on the engine's core (`worker.cores`); everything else goes to the other."""
        self.tree.bind(self.tree.threads_of(self.engine), {cores.engine}, {cores.rest})

    def process(self, name: str) -> psutil.Process:
        """One of its services. Raises InternalError when there is none."""
        try:
            return psutil.Process(self.pids()[name])
        except KeyError:
            raise InternalError(f"the stack has no {name}") from None

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far, by child; a worker's engine apart from the rest of it."""
        used: dict[str, float] = {}
        for name, pid in self.pids().items():
            for thread in psutil.Process(pid).threads():
                is_engine = name.startswith("worker-") and thread.id != pid
                part = f"{name} engine" if is_engine else name
                used[part] = used.get(part, 0.0) + thread.user_time + thread.system_time
        return used

    def details(self, key: str) -> dict[str, Any]:
        """That part of the stack's status which has `key`. Raises InternalError when there is none."""
        details = _find(self._status(), key)
        if details is None:
            raise InternalError(f"the stack's status does not tell {key}")
        return details

    def services(self) -> list[dict[str, Any]]:
        """What every instance says of itself. Raises InternalError when the stack does not tell."""
        return list(self._status()["services"])

    def _status(self) -> dict[str, Any]:
        argv = [sys.executable, "-m", "services", "status", "--json", "--run-dir", str(self.run_dir)]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=_STATUS_S, check=False)
        if done.returncode != 0:
            raise InternalError(f"the stack does not tell its status: {done.stderr[-300:]}")
        return dict(json.loads(done.stdout))

    def pids(self) -> dict[str, int]:
        """Of the processes that run, by name."""
        state = json.loads((self.run_dir / "state.json").read_text())
        return {child["name"]: child["pid"] for child in state["children"] if child["pid"]}


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
) -> Stack:
    """`python -m services up` on ports of its own, with its log beside `run_dir`, once it is ready.

    It inherits the caller's cores: bind the client afterwards. `refuses`: new requests that would wait for
    long are refused, as by default; otherwise they wait, as in the servers of others. Raises InternalError
    when it does not come up.
    """
    settings = settings if refuses else {"scheduler.refuse_wait_s": 0, **settings}
    port = free_port()
    argv = [sys.executable, "-m", "services", "up", "--run-dir", str(run_dir), "--port", str(port)]
    argv += ["--nats-port", str(free_port()), "--workers", str(workers), "--model", str(model)]
    argv += ["--gateways", str(gateways)] if gateways > 1 else []
    for key, value in settings.items():
        argv += ["--set", f"{key}={value if isinstance(value, str | Path) else json.dumps(value)}"]
    log = run_dir.with_name(f"{run_dir.name}.log")
    tree = ProcessTree(name, argv, {**os.environ, **environ}, log, ROOT)
    started(Server(name, tree, Target(port, model.name)), "/ready")
    target = Target(port, model.name, RunDirectory(run_dir).credentials().api_key)
    return Stack(name, tree, target, "worker-0", settings, run_dir)


@asynccontextmanager
async def on_bus(
    run_dir: Path, user: str, handlers: Sequence[Handler] = (), listener: object = None
) -> AsyncIterator[Bus]:
    """A connection to the bus of the stack that runs from `run_dir`, with what the service `user` may do.

    `listener` gets what `handlers` name.
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
    """The object, however deep in a JSON document, that has `key`."""
    if isinstance(document, dict):
        if key in document:
            return document
        document = list(document.values())
    if isinstance(document, list):
        return next((found for one in document if (found := _find(one, key)) is not None), None)
    return None
