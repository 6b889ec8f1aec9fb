"""Run `kvasir` commands as forks of a process that has imported everything: imports take most of a start.

`Warm` is the client, in the test's process. A supervisor forks its seed in the same way. The commands
themselves are those that a user types.
"""

import atexit
import contextlib
import gc
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from services.stack import seed
from services.stack.cli import Program, main
from services.stack.process import ChildProcess, die_with_parent
from services.stack.rundir import ROOT
from services.stack.supervisor import ChildSpec
from services.stack.table import kvasir_table
from shared.subjects import SERVICES

_OTHERS = ("services.worker.building", "services.stack.up")
_IMPORTED = (*(f"services.{name}.service" for name in SERVICES), *_OTHERS)
_START_S = 240.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)


class Running:
    """A started command."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._said = connection, b""
        self.pid = self._number(0, _START_S)

    def code(self, within_s: float) -> int | None:
        """Return the exit code, negative for a signal, or None if the command still runs after `within_s`."""
        try:
            code = self._number(1, within_s)
        except TimeoutError:
            return None
        self._connection.close()
        return code

    def _number(self, line: int, within_s: float) -> int:
        self._connection.settimeout(within_s)
        while self._said.count(b"\n") <= line:
            part = self._connection.recv(64)
            if not part:
                return -signal.SIGKILL
            self._said += part
        return int(self._said.split(b"\n")[line])


class Warm:
    """Client of the process that forks commands; that process is a child of this one."""

    def __init__(self) -> None:
        self._socket = Path(mkdtemp(prefix="warm-")) / "socket"
        argv = [sys.executable, "-m", "tests.stack.warm", str(self._socket)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        self._process = subprocess.Popen(argv, cwd=ROOT, env=env, stdin=subprocess.PIPE)
        atexit.register(self._end)

    def run(self, argv: Sequence[str], out: Path, errors: Path) -> Running:
        """Start a command whose output goes to these files."""
        request = {"argv": argv, "env": dict(os.environ), "out": str(out), "errors": str(errors)}
        deadline_s = time.monotonic() + _START_S
        connection = socket.socket(socket.AF_UNIX)
        while True:
            try:
                connection.connect(str(self._socket))
                break
            except (FileNotFoundError, ConnectionRefusedError):
                assert self._process.poll() is None and time.monotonic() < deadline_s
                time.sleep(0.02)
        connection.sendall(json.dumps(request).encode() + b"\n")
        return Running(connection)

    def _end(self) -> None:
        self._process.communicate(timeout=_START_S)
        rmtree(self._socket.parent, ignore_errors=True)


@cache
def warm() -> Warm:
    """Return the client of this test process."""
    return Warm()


@dataclass(frozen=True)
class ForkedSeed:
    """Forks the seed from the supervisor, unless the seed runs other code."""

    socket: Path

    async def __call__(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log_path: Path
    ) -> ChildProcess:
        if cwd != ROOT:
            return ChildProcess.start(argv, env, cwd, log_path)
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            with _ending():
                _begin(env, log_path, log_path)
                die_with_parent(supervisor)()
                seed.serve(self.socket, supervisor)
        return ChildProcess.adopt(pid)


def _table(*arguments: Any, **named: Any) -> list[ChildSpec]:
    specs = kvasir_table(*arguments, **named)
    return [replace(s, launch=ForkedSeed(Path(s.argv[3]))) if s.name == "seed" else s for s in specs]


def _listen(path: Path) -> None:
    for module in _IMPORTED:
        import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended forks need no wait
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        while (
            listening in select.select([listening, sys.stdin], [], [])[0]
        ):  # a test that is gone closes stdin
            connection, _ = listening.accept()
            with connection:
                if os.fork() == 0:
                    with _ending():
                        _carry_out(connection)


def _carry_out(connection: socket.socket) -> None:
    """Fork the command and send its pid, then its exit code when it ends."""
    die_with_parent(os.getppid())()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection.makefile("rb") as lines:
        request = json.loads(lines.readline())
    between = os.getpid()
    pid = os.fork()
    if pid == 0:
        with _ending():
            _begin(request["env"], request["out"], request["errors"])
            die_with_parent(between)()
            os._exit(main(request["argv"], Program(make_table=_table)))
    os.setsid()  # signals to the test's process group do not reach it
    connection.sendall(b"%d\n" % pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(b"%d\n" % code)
    os._exit(0)


def _begin(env: Mapping[str, str], out: str | Path, errors: str | Path) -> None:
    """Give this fork the session, signals, files and variables of a program that was just started."""
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    files = [os.open(os.devnull, os.O_RDONLY)]
    files += [os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) for path in (out, errors)]
    for target, source in enumerate(files):
        os.dup2(source, target)
    os.closerange(3, 1024)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [each for each in env.get("PYTHONPATH", "").split(os.pathsep) if each not in sys.path]
    random.seed()


@contextlib.contextmanager
def _ending() -> Any:
    """End the process with the block: a fork must not go on as what it was forked from."""
    code = 1
    try:
        yield
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _listen(Path(sys.argv[1]))
