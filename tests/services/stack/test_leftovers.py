"""Ending what a killed supervisor left behind."""

import asyncio
import os
import time
from pathlib import Path

import psutil

from services.stack.leftovers import end_leftovers
from services.stack.leftovers import is_alive as alive
from services.stack.process import ChildProcess
from tests.services.stack.standin import PARENT, PYTHON


async def test_ends_groups_and_spares_who_has_the_pid_now(tmp_path: Path) -> None:
    left = ChildProcess.start((*PYTHON, PARENT), os.environ, tmp_path, tmp_path / "log")
    other = ChildProcess.start(("sleep", "1000"), os.environ, tmp_path, tmp_path / "log")
    now_s = time.time()
    async with asyncio.timeout(10.0):
        while not psutil.Process(left.pid).children():
            await asyncio.sleep(0.01)
    state = {
        "children": [
            {"pid": left.pid, "started_unix_s": now_s},
            {"pid": other.pid, "started_unix_s": now_s - 1000.0},
            {"pid": None, "started_unix_s": now_s},
        ]
    }
    assert end_leftovers(state) == 2, "the child and its own child"
    assert alive(other.pid)
    assert not alive(left.pid)
    other.kill()
    await asyncio.gather(left.wait(), other.wait())
    assert end_leftovers(state) == 0
    assert end_leftovers({}) == 0
