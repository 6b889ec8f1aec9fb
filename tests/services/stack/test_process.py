"""Child processes, with real kills."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from services.stack.down import is_alive as alive
from services.stack.process import ChildProcess
from tests.patience import PATIENCE_S
from tests.services.stack.standin import PARENT, PYTHON

PARENT_OF_ONE = """
import os, pathlib, sys, time
from services.stack.process import ChildProcess
from tests.patience import PATIENCE_S
here = pathlib.Path(sys.argv[1])
print(ChildProcess.start(["sleep", "1000"], os.environ, here, here / "log").pid, flush=True)
time.sleep(1000)
"""


def child(argv: tuple[str, ...], here: Path) -> ChildProcess:
    return ChildProcess.start(argv, dict(os.environ), here, here / "child.log")


async def until_gone(*pids: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        for pid in pids:
            while alive(pid):
                await asyncio.sleep(0.01)


async def test_tells_how_it_ended_and_logs_what_it_said(tmp_path: Path) -> None:
    running = child(
        (*PYTHON, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"), tmp_path
    )
    async with asyncio.timeout(PATIENCE_S):
        assert await running.wait() == 7
    assert sorted((tmp_path / "child.log").read_text().split()) == ["err", "out"]


async def test_a_stopped_child_is_woken_to_end(tmp_path: Path) -> None:
    running = child(("sleep", "1000"), tmp_path)
    os.kill(running.pid, signal.SIGSTOP)
    running.terminate()
    async with asyncio.timeout(PATIENCE_S):
        assert await running.wait() == -signal.SIGTERM


async def test_what_a_child_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    running = child((*PYTHON, PARENT), tmp_path)
    async with asyncio.timeout(PATIENCE_S):
        while not (grandchildren := psutil.Process(running.pid).children()):
            await asyncio.sleep(0.01)
    os.kill(running.pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        await running.wait()
    await until_gone(grandchildren[0].pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets the kernel see to it")
def test_killed_parent_takes_its_child_along(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT_OF_ONE, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
        parent.wait(timeout=PATIENCE_S)
    asyncio.run(until_gone(pid))
