"""`down`: stop the stack of a run directory, wait until it is gone, and report. A killed supervisor may leave
children, and children of theirs. They are identified by process group and start time, because pids are
reused."""

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import psutil
from rich.console import Console

from services.stack.display import say
from services.stack.process import comes_true
from services.stack.rundir import RunDirectory

_STOP_WAIT_S = 45.0
"""The supervisor stops within three stages of its grace period."""
_KILL_WAIT_S = 5.0


def down(run: RunDirectory, console: Console) -> int:
    """Return 0 when nothing runs, 1 if something could not be stopped. Idempotent."""
    began_s = time.monotonic()
    pid = run.holder()
    if pid is None:
        left = end_leftovers(run.read_state())
        what = f"; ended {left} processes that it had left behind" if left else ""
        say(console, f"nothing runs from {run.path}{what}")
        return 0
    how = "stopped"
    if not _ends(run, pid, signal.SIGTERM, _STOP_WAIT_S):
        how = "killed"
        if not _ends(run, pid, signal.SIGKILL, _KILL_WAIT_S):
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


def _ends(run: RunDirectory, pid: int, number: signal.Signals, within_s: float) -> bool:
    """Send the supervisor a signal; return True if it is gone in time."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    return comes_true(lambda: run.holder() is None and not is_alive(pid), within_s)


_CLOCK_SLACK_S = 2.0
_LEFTOVERS_POLL_S = 0.02


def end_leftovers(state: Mapping[str, Any]) -> int:
    """Kill leftover processes of the children in `state`; return their number."""
    started_s = {row["pid"]: row["started_unix_s"] for row in state.get("children", []) if row.get("pid")}
    found = [p for p in psutil.process_iter() if _is_left(p, started_s)] if started_s else []
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    comes_true(lambda: not any(is_alive(process.pid) for process in found), _KILL_WAIT_S, _LEFTOVERS_POLL_S)
    return len(found)


def _is_left(process: psutil.Process, started_s: Mapping[int, float]) -> bool:
    """Return True for a child, or for a later member of its group whose leader is gone or that child."""
    try:
        group = os.getpgid(process.pid)
        if group not in started_s or process.status() == psutil.STATUS_ZOMBIE:
            return False
        if process.pid == group:
            return bool(abs(process.create_time() - started_s[group]) < _CLOCK_SLACK_S)
        later = process.create_time() > started_s[group] - _CLOCK_SLACK_S
        return bool(later and _leader_is_it(group, started_s[group]))
    except (psutil.Error, ProcessLookupError):
        return False


def is_alive(pid: int) -> bool:
    """Return True if the process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _leader_is_it(group: int, started_s: float) -> bool:
    try:
        return bool(abs(psutil.Process(group).create_time() - started_s) < _CLOCK_SLACK_S)
    except psutil.NoSuchProcess:
        return True
