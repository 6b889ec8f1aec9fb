"""One child process: in a session of its own, logging to a file, gone when its parent is gone.

On Linux the kernel kills the child when the supervisor dies, however it dies; elsewhere only an orderly end
does. It knows nothing of what the child is for.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
"""Loaded before the first fork: a child must not import anything between fork and exec."""


def die_with_parent(parent_pid: int) -> Callable[[], None]:
    """For the child, between fork and exec: SIGKILL it when `parent_pid` dies, or has died already."""

    def in_child() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:
            os._exit(1)

    return in_child


class ChildProcess:
    """A running child. Call `wait` exactly once; it also ends whatever the child left in its process
    group."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log_path: Path) -> None:
        """Raises OSError when the program cannot be started."""
        with log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                argv,
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509  # one thread here, nothing imported
            )
        self.pid = self._popen.pid

    async def wait(self) -> int:
        """The exit status, negative for a signal, as `subprocess` has it."""
        await _ended(self.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # not reaped yet, so the id is still its own
        return self._popen.wait()

    def terminate(self) -> None:
        """Ask it to end; a stopped one is woken to hear it."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it and everything in its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(number)


async def _ended(pid: int) -> None:
    """Returns when the child is a zombie; does not reap it."""
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


async def _polled(pid: int) -> None:
    """`_ended` where the kernel has no pidfd."""
    over = False
    while not over:
        await asyncio.sleep(_POLL_S)
        over = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None  # noqa: ASYNC222  # WNOHANG


def describe_exit(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
