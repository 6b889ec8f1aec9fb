"""A child process in its own session, which logs to a file and dies with its parent. On Linux, the kernel
kills the child whenever the supervisor dies; elsewhere, only an orderly stop ends it. A child is an executed
program, or a fork of the seed, which has already imported its modules."""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_ARG_START, _ARG_END = 45, 46
"""Fields of /proc/self/stat with the bounds of the command line, counted after the name (proc(5))."""
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
_ORPHAN_POLLS, _ORPHAN_POLL_S = 20, 0.01
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
"""Loaded before the first fork, because a child must not import between fork and exec."""


def comes_true(condition: Callable[[], bool], within_s: float, poll_s: float = _POLL_S) -> bool:
    """Return True once the condition holds, False if it does not within that time."""
    until_s = time.monotonic() + within_s
    while not (is_true := condition()) and time.monotonic() < until_s:
        time.sleep(poll_s)
    return is_true


def die_with_parent(parent_pid: int) -> Callable[[], None]:
    """Return a function for the child, between fork and exec, that ties its life to `parent_pid`."""

    def in_child() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:
            os._exit(1)

    return in_child


def name_process(name: str, argv: Sequence[str]) -> None:
    """Set what `ps` and `top` show for a forked process, on Linux."""
    if _libc is None:
        return
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        first, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        line = b"\0".join(word.encode() for word in argv)[: end - first - 1]
        if 0 < first < end:
            ctypes.memmove(first, line.ljust(end - first, b"\0"), end - first)


def is_traced(pid: int) -> bool:
    """Return True if a debugger holds the process."""
    with contextlib.suppress(OSError):
        return "\nTracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text()
    return False


def become_subreaper() -> bool:
    """Make orphaned descendants children of this process; return False if unsupported."""
    return _libc is not None and _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


class ChildProcess:
    """A running process. Call `wait` exactly once; it also kills the rest of the process group."""

    def __init__(self, pid: int, reap: Callable[[], int]) -> None:
        self.pid = pid
        self._reap = reap
        self._reaped = False

    @classmethod
    def start(cls, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log_path: Path) -> "ChildProcess":
        """Start a program. Raise OSError if it cannot be started."""
        with log_path.open("ab") as log:
            popen = subprocess.Popen(
                argv,
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509  # one thread, no imports
            )
        return cls(popen.pid, popen.wait)

    @classmethod
    def adopt(cls, pid: int) -> "ChildProcess":
        """Take over a process that became a child of this one. Raise ChildProcessError if it is not."""
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return cls(pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    async def wait(self) -> int:
        """Return the exit status, negative for a signal, as in `subprocess`."""
        await _ended(self.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # not reaped yet, so the pid is not reused
        self._reaped = True
        status = self._reap()
        await _reap_orphans(self.pid)
        return status

    def terminate(self) -> None:
        """Send SIGTERM, and SIGCONT in case it is stopped."""
        self._signal(os.kill, signal.SIGTERM)
        self._signal(os.kill, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it and its process group."""
        self._signal(os.killpg, signal.SIGKILL)
        self._signal(os.kill, signal.SIGKILL)

    def _signal(self, send: Callable[[int, int], None], number: signal.Signals) -> None:
        if not self._reaped:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                send(self.pid, number)


async def _ended(pid: int) -> None:
    """Wait until the child is a zombie, without reaping it."""
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):
        await _polled(pid)
        return
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _reap_orphans(group: int) -> None:
    """Reap what the child left behind, if this process is its subreaper."""
    for _ in range(_ORPHAN_POLLS):
        try:
            while os.waitpid(-group, os.WNOHANG)[0]:  # noqa: ASYNC222  # does not wait
                pass
        except ChildProcessError:
            return
        await asyncio.sleep(_ORPHAN_POLL_S)


async def _polled(pid: int) -> None:
    """`_ended` for kernels without pidfd."""
    over = False
    while not over:
        await asyncio.sleep(_POLL_S)
        over = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None  # noqa: ASYNC222  # WNOHANG


def describe_exit(status: int) -> str:
    """Describe an exit status."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


_SEED_DEADLINE_S = 90.0
_SEED_POLL_S = 0.02
_ANSWER_DEADLINE_S = 10.0
_MAX_SOCKET_PATH_BYTES = 100
"""Below the kernel's limit of 108."""


Launch = Callable[[Sequence[str], Mapping[str, str], Path, Path], Awaitable["ChildProcess"]]
"""Starts a child of these words, variables, folder and log. Raises OSError."""


async def start_program(
    argv: Sequence[str], env: Mapping[str, str], cwd: Path, log_path: Path
) -> ChildProcess:
    """Execute `argv` as a program."""
    return ChildProcess.start(argv, env, cwd, log_path)


@dataclass(frozen=True)
class SeedLauncher:
    """Asks the seed to fork a child that runs `python -m module …`. The seed listens at `socket` and has
    imported the modules. Without a seed, `argv` is executed."""

    socket: Path
    name: str
    module: str
    arguments: tuple[str, ...]

    async def __call__(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log_path: Path
    ) -> ChildProcess:
        try:
            if become_subreaper():
                request = {"name": self.name, "module": self.module, "argv": self.arguments}
                whole = json.dumps({**request, "env": dict(env), "log": str(log_path)})
                return ChildProcess.adopt(await self._ask(whole))
        except (OSError, TimeoutError, ValueError):
            pass
        return ChildProcess.start(argv, env, cwd, log_path)

    async def _ask(self, request: str) -> int:
        async with asyncio.timeout(_SEED_DEADLINE_S):
            reader, writer = await self._connect()
        try:
            async with asyncio.timeout(_ANSWER_DEADLINE_S):
                writer.write(request.encode() + b"\n")
                await writer.drain()
                return int(await reader.readline())
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            try:
                return await asyncio.open_unix_connection(str(self.socket))
            except FileNotFoundError:  # seed is still importing; a dead one refuses
                await asyncio.sleep(_SEED_POLL_S)


def socket_fits(path: Path) -> bool:
    """Return True if the path is short enough for a socket."""
    return len(str(path).encode()) <= _MAX_SOCKET_PATH_BYTES
