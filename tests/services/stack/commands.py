"""Running the stack's commands over stand-in children, as a person or a script would."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from services.stack.rundir import RunDirectory
from tests.tasks import ran

STANDIN = [sys.executable, "-m", "tests.services.stack.standin"]
ROOT = Path(__file__).parents[3]
DEADLINE_S = 20.0


def command(*words: str, extra: str | None = None) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, **({"STANDIN_EXTRA": extra} if extra else {})}
    return ran([*STANDIN, *words], env=env, timeout=DEADLINE_S)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


def pids_of(run: Path) -> dict[str, int]:
    return {row["name"]: row["pid"] for row in state_of(run)["children"] if row["pid"]}


def state_of(run: Path) -> dict[str, Any]:
    return RunDirectory(run).read_state()


def is_ready(run: Path, supervisor: int) -> bool:
    state = state_of(run)
    return state.get("pid") == supervisor and state.get("phase") == "ready"


def family(run: Path) -> list[int]:
    """Children, and the child's child of `parent`."""
    pids = pids_of(run)
    until(lambda: bool(psutil.Process(pids["parent"]).children()), "the stand-in parent has no child")
    return [*pids.values(), *(p.pid for p in psutil.Process(pids["parent"]).children())]


def start(run: Path, port: int) -> "subprocess.Popen[str]":
    words = ["up", "--run-dir", str(run), f"--port={port}", "--nats-port=0", "--stop-grace=0.3"]
    with (run / "out").open("w") as out:
        process = subprocess.Popen(
            [*STANDIN, *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    until(lambda: is_ready(run, process.pid) or process.poll() is not None, "not ready")
    assert process.poll() is None, (run / "out").read_text()
    return process
