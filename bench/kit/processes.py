"""Processes of one side of a comparison: started in their own session, ended, stopped and bound together.

A side is a process and everything that descends from it, in whatever session: a stack's services have
sessions of their own. Knows nothing of what runs in them. Linux only.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import psutil

from shared.errors import ConfigError, InternalError

_POLL_S = 0.05
_KILL_WAIT_S = 5.0
_GONE = (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess)


class ProcessTree:
    """A running process tree."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path) -> None:
        """Starts it. Raises ConfigError when there is no such program."""
        self.name = name
        self.log = log
        self._seen: dict[int, psutil.Process] = {}
        try:
            with log.open("ab") as out:
                self._popen = subprocess.Popen(
                    argv,
                    env=dict(env),
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(f"{argv[0]} cannot be started: {error.strerror}") from error
        self._root = psutil.Process(self._popen.pid)

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def processes(self) -> list[psutil.Process]:
        """The root and all its living descendants, also those that were seen before and lost their parent."""
        with contextlib.suppress(*_GONE):
            for process in (self._root, *self._root.children(recursive=True)):
                self._seen[process.pid] = process
        self._seen = {pid: one for pid, one in self._seen.items() if _alive(one)}
        return list(self._seen.values())

    def await_(self, ready: Callable[[], bool], within_s: float) -> None:
        """Returns when `ready` says so. Raises InternalError, with the log's end, when it does not."""
        deadline_s = time.monotonic() + within_s
        while not ready():
            self.processes()
            if not self.running:
                raise InternalError(f"{self.name} ended with code {self._popen.returncode}:\n{self.tail()}")
            if time.monotonic() > deadline_s:
                raise InternalError(f"{self.name} was not ready within {within_s:g} s:\n{self.tail()}")
            time.sleep(_POLL_S)

    def tail(self, lines: int = 15) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def pause(self) -> None:
        """SIGSTOP to every process; it computes nothing until `resume`."""
        for process in self.processes():
            with contextlib.suppress(*_GONE):
                process.suspend()

    def resume(self) -> None:
        """SIGCONT, children first: who supervises wakes up last and finds everybody awake."""
        for process in reversed(self.processes()):
            with contextlib.suppress(*_GONE):
                process.resume()

    def end(self, grace_s: float = 10.0) -> None:
        """SIGTERM to the root, after `grace_s` SIGKILL to whatever is left. Never leaves a process behind."""
        self.processes()
        self.resume()
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(grace_s)
        left = self.processes()
        for process in left:
            with contextlib.suppress(*_GONE):
                process.kill()
        psutil.wait_procs(left, timeout=_KILL_WAIT_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_KILL_WAIT_S)

    def cpu_s(self) -> dict[int, float]:
        """CPU seconds of every thread so far, by thread id."""
        used: dict[int, float] = {}
        for process in self.processes():
            with contextlib.suppress(*_GONE):
                used |= {one.id: one.user_time + one.system_time for one in process.threads()}
        return used

    def threads_of(self, process_name: str) -> set[int]:
        """Ids of all threads of the processes whose name begins so."""
        found: set[int] = set()
        for process in self.processes():
            with contextlib.suppress(*_GONE):
                if process.name().startswith(process_name):
                    found |= {thread.id for thread in process.threads()}
        return found

    def bind(
        self, engine_threads: Collection[int], engine_cores: Collection[int], cores: Collection[int]
    ) -> None:
        """Binds the engine's threads to `engine_cores`, every other thread of the side to `cores`."""
        for thread in self.cpu_s():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, engine_cores if thread in engine_threads else cores)


def busiest_threads(before: Mapping[int, float], after: Mapping[int, float], count: int = 1) -> list[int]:
    """Which threads used most CPU time in between: under load, the ones that compute."""
    used = {thread: after[thread] - before.get(thread, 0.0) for thread in after}
    return sorted(used, key=lambda thread: -used[thread])[:count]


def available_cores() -> list[int]:
    """What this process may be bound to. Raises ConfigError for fewer than two: a comparison needs both."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError(
            "a fair comparison needs two cores, one for the engine, one for the rest; there is one"
        )
    return cores


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except _GONE:
        return False
