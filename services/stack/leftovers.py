"""What a killed supervisor may have left behind: children the kernel did not end, and children of theirs.

Processes are recognised by their group (each child leads one) and by when they started, because pids come
round again. It reads a state and asks nobody.
"""

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any

import psutil

_CLOCK_SLACK_S = 2.0
_KILL_WAIT_S = 5.0
_POLL_S = 0.02


def end_leftovers(state: Mapping[str, Any]) -> int:
    """Kills what is left of the children in `state`; returns how many processes that were."""
    started_s = {row["pid"]: row["started_unix_s"] for row in state.get("children", []) if row.get("pid")}
    found = [p for p in psutil.process_iter() if _is_left(p, started_s)] if started_s else []
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    deadline_s = time.monotonic() + _KILL_WAIT_S
    while any(is_alive(process.pid) for process in found) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    return len(found)


def _is_left(process: psutil.Process, started_s: Mapping[int, float]) -> bool:
    """A child itself, or a later member of its group whose leader is gone or still that child."""
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
    """Whether it runs; a process that only waits for its parent to take note does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _leader_is_it(group: int, started_s: float) -> bool:
    try:
        return bool(abs(psutil.Process(group).create_time() - started_s) < _CLOCK_SLACK_S)
    except psutil.NoSuchProcess:
        return True
