"""Process trees of the sides of a comparison: start, end, pause and bind them together.

A tree is a process and all its descendants, in any session: a stack's services have their own sessions. Linux
only.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.kit.provenance import ROOT
from shared.errors import ConfigError, InternalError

_POLL_S = 0.05
_KILL_WAIT_S = 5.0
_GONE = (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess)


class ProcessTree:
    """A running process tree."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path) -> None:
        """Start the process. Raises ConfigError if the program is missing."""
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
        """Return the root and all living descendants, also those that lost their parent."""
        with contextlib.suppress(*_GONE):
            for process in (self._root, *self._root.children(recursive=True)):
                self._seen[process.pid] = process
        self._seen = {pid: one for pid, one in self._seen.items() if _alive(one)}
        return list(self._seen.values())

    def await_(self, ready: Callable[[], bool], within_s: float) -> None:
        """Wait until `ready` is true. Raises InternalError with the end of the log if it ends or times
        out."""
        deadline_s = time.monotonic() + within_s
        while not ready():
            self.processes()
            if not self.running:
                raise InternalError(f"{self.name} ended with code {self._popen.returncode}:\n{self.tail()}")
            if time.monotonic() > deadline_s:
                raise InternalError(f"{self.name} was not ready within {within_s:g} s:\n{self.tail()}")
            time.sleep(_POLL_S)

    def tail(self, lines: int = 15) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def pause(self) -> None:
        """Send SIGSTOP to every process."""
        for process in self.processes():
            with contextlib.suppress(*_GONE):
                process.suspend()

    def resume(self) -> None:
        """Send SIGCONT, children first, so that a supervisor wakes up last."""
        for process in reversed(self.processes()):
            with contextlib.suppress(*_GONE):
                process.resume()

    def end(self, grace_s: float = 10.0) -> None:
        """Send SIGTERM to the root, and SIGKILL to all that is left after `grace_s`."""
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
        """Return the CPU seconds of every thread, by thread id."""
        used: dict[int, float] = {}
        for process in self.processes():
            with contextlib.suppress(*_GONE):
                used |= {one.id: one.user_time + one.system_time for one in process.threads()}
        return used

    def threads_of(self, process_name: str) -> set[int]:
        """Return the thread ids of all processes whose name begins with `process_name`."""
        found: set[int] = set()
        for process in self.processes():
            with contextlib.suppress(*_GONE):
                if process.name().startswith(process_name):
                    found |= {thread.id for thread in process.threads()}
        return found

    def bind(
        self, engine_threads: Collection[int], engine_cores: Collection[int], cores: Collection[int]
    ) -> None:
        """Bind the engine's threads to `engine_cores` and all other threads to `cores`."""
        for thread in self.cpu_s():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, engine_cores if thread in engine_threads else cores)


def busiest_threads(before: Mapping[int, float], after: Mapping[int, float], count: int = 1) -> list[int]:
    """Return the threads that used most CPU time between two readings."""
    used = {thread: after[thread] - before.get(thread, 0.0) for thread in after}
    return sorted(used, key=lambda thread: -used[thread])[:count]


def available_cores() -> list[int]:
    """Return the cores that this process may use. Raises ConfigError if there are fewer than two."""
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


class Child:
    """A `python -m MODULE …` that speaks in lines of JSON; killed at the end of its `with` block."""

    def __init__(self, *words: str) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.name = words[0]
        self.process = subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, **pipes)

    def hear(self) -> dict[str, Any]:
        """Return its next line. Raises InternalError if it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise InternalError(f"{self.name} ended with code {self.process.wait()}: its error is above")
        return dict(json.loads(line))

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Write a line and return the next one. Raises InternalError if it has ended."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(question), file=self.process.stdin, flush=True)
        return self.hear()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()
