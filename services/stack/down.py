"""`down`: end the stack of a run directory, wait until it is gone, say what was done."""

import contextlib
import os
import signal
import time

from rich.console import Console

from services.stack.display import say
from services.stack.leftovers import end_leftovers, is_alive
from services.stack.rundir import RunDirectory

_STOP_WAIT_S = 45.0
"""The supervisor bounds its own end: three stages of its grace period."""
_KILL_WAIT_S = 5.0
_POLL_S = 0.05


def down(run: RunDirectory, console: Console) -> int:
    """0 when nothing runs any more; 1 when something could not be ended. May be called again."""
    began_s = time.monotonic()
    pid = run.holder()
    if pid is None:
        left = end_leftovers(run.read_state())
        what = f"; ended {left} processes that it had left behind" if left else ""
        say(console, f"nothing runs from {run.path}{what}")
        return 0
    _signal(pid, signal.SIGTERM)
    how = "stopped"
    if not _gone(run, pid, _STOP_WAIT_S):
        how = "killed"
        _signal(pid, signal.SIGKILL)
        if not _gone(run, pid, _KILL_WAIT_S):
            say(console, f"the supervisor (pid {pid}) of {run.path} could not be ended")
            return 1
    left = end_leftovers(run.read_state())
    count = len(run.read_state().get("children", []))
    extra = f", {left} of them left behind and killed" if left else ""
    say(
        console,
        f"{how} the stack of {run.path} (pid {pid}): {count} processes{extra}, "
        f"in {time.monotonic() - began_s:.1f} s",
    )
    return 0


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _gone(run: RunDirectory, pid: int, timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while run.holder() is not None or is_alive(pid):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True
