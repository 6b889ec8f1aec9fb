"""`up --detach`: start a stack in its own session, and return when it is ready or has failed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from services.stack.display import access_text, ready_text, say
from services.stack.obstructions import running_already
from services.stack.rundir import RunDirectory
from services.stack.table import ROOT

_POLL_S = 0.05
_STOP_WAIT_S = 60.0


def up_detached(
    run: RunDirectory, module: str, argv: Sequence[str], console: Console, *, if_needed: bool = False
) -> int:
    """Run `python -m <module> <argv>` in the background. Return 0 once it is ready, else its exit code.

    With `if_needed`, accept a ready stack in this run directory. Raise Obstructed.
    """
    run.create()
    if run.holder() is not None:
        if if_needed and _show_running(run, console):
            return 0
        raise running_already(run)
    log_path = run.path / "supervisor.log"
    search = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # keep relative paths valid
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(search)},
        )
    try:
        ready = _await_ready(run, process, log_path, console)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=_STOP_WAIT_S)
        raise
    if not ready:
        return process.returncode or 1
    state = run.read_state()
    say(console, access_text(state["url"], run.credentials().api_key, state["model"], run))
    say(console, f"running in the background (pid {process.pid})")
    return 0


def _show_running(run: RunDirectory, console: Console) -> bool:
    """Show the running stack; return False if it is not ready."""
    state = run.read_state()
    if state.get("pid") != run.holder() or state.get("phase") != "ready":
        return False
    text = ready_text(state["url"], run.credentials().api_key, state["model"], state["ready_s"], run)
    age_s = time.time() - state["started_unix_s"]
    say(console, f"runs already, since {age_s:.0f} s, with the code and settings of then; was {text}")
    return True


def _await_ready(
    run: RunDirectory, process: subprocess.Popen[bytes], log_path: Path, console: Console
) -> bool:
    """Relay the supervisor's output until ready or ended. The supervisor has its own start timeout."""
    with log_path.open() as log:
        while True:
            ended, state = process.poll() is not None, run.read_state()
            ready = state.get("pid") == process.pid and state.get("phase") == "ready"
            for line in log.read().splitlines():
                if line.startswith("error: "):
                    print(line, file=sys.stderr)
                else:
                    say(console, line)
            if ended or ready:
                return ready and not ended
            time.sleep(_POLL_S)
