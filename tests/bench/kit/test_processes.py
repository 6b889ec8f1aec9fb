"""Real process trees: stopped, woken, bound and ended as a whole."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bench.kit.processes import ProcessTree, available_cores, busiest_threads
from shared.errors import InternalError

_FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time\\nwhile True: sum(range(1000))"],
                         start_new_session=True)
print("started", flush=True)
time.sleep(60)
"""


def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def start(tmp_path: Path, program: str) -> ProcessTree:
    return ProcessTree("side", [sys.executable, "-c", program], dict(os.environ), tmp_path / "log", tmp_path)


def test_a_whole_family_is_stopped_woken_and_ended(tmp_path: Path) -> None:
    side = start(tmp_path, _FAMILY)
    try:
        until(lambda: "started" in side.log.read_text() and len(side.processes()) == 2)
        _, child = side.processes()
        side.pause()
        until(lambda: child.status() == psutil.STATUS_STOPPED)
        before = side.cpu_s()
        time.sleep(0.2)
        assert side.cpu_s() == before
        side.resume()
        until(lambda: side.cpu_s()[child.pid] > before[child.pid])
        assert busiest_threads(before, side.cpu_s()) == [child.pid]
    finally:
        side.end()
    assert not psutil.pid_exists(child.pid)
    assert not side.running


def test_the_engine_gets_its_core_and_the_rest_another(tmp_path: Path) -> None:
    cores = available_cores()
    side = start(tmp_path, _FAMILY)
    try:
        until(lambda: len(side.processes()) == 2)
        parent, child = side.processes()
        side.bind([child.pid], {cores[0]}, {cores[1]})
        assert os.sched_getaffinity(child.pid) == {cores[0]}
        assert os.sched_getaffinity(parent.pid) == {cores[1]}
        assert side.threads_of(child.name()) >= {child.pid}
        assert side.threads_of("no such process") == set()
    finally:
        side.end()


def test_a_process_that_ends_early_says_why(tmp_path: Path) -> None:
    side = start(tmp_path, "raise SystemExit('out of luck')")
    with pytest.raises(InternalError, match="out of luck"):
        side.await_(lambda: False, within_s=10.0)
    side.end()
