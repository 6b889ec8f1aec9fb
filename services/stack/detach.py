"""`up --detach`: start a stack in a session of its own, return when it is ready or has failed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from services.stack.obstructions import running_already
from services.stack.rundir import RunDirectory
from services.stack.table import ROOT

_POLL_S = 0.05
_STOP_WAIT_S = 60.0


def up_detached(run: RunDirectory, module: str, argv: Sequence[str], console: Console) -> int:
    """Runs `python -m <module> <argv>` in the background; 0 when it is ready, else its exit code. Raises
    Obstructed."""
    run.create()
    if run.holder() is not None:
        raise running_already(run)
    log_path = run.path / "supervisor.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *argv],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    try:
        ready = _await_ready(run, process)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=_STOP_WAIT_S)
        raise
    console.print(log_path.read_text().rstrip(), soft_wrap=True, highlight=False, markup=False)
    if not ready:
        return process.returncode or 1
    console.print(
        f"running in the background (pid {process.pid}); `python -m {module} down` ends it",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    return 0


def _await_ready(run: RunDirectory, process: subprocess.Popen[bytes]) -> bool:
    """The supervisor bounds its own start, so this ends."""
    while process.poll() is None:
        state = run.read_state()
        if state.get("pid") == process.pid and state.get("phase") == "ready":
            return True
        time.sleep(_POLL_S)
    return False
