"""The stack that the clients talk to: started as a user would start it, on free ports, and ended."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv" / "bin" / "python"
"""The stack's own interpreter: the clients' environment knows nothing of it."""
START_S, STOP_S = 150, 60


@dataclass(frozen=True)
class Serving:
    """Where a stack answers."""

    base_url: str
    key: str
    model: str


def _command(word: str, run_dir: Path, *flags: str, limit_s: int) -> None:
    done = subprocess.run(
        [PYTHON, "-m", "services", word, "--run-dir", run_dir, *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{word}: {done.returncode}\n{done.stdout}\n{done.stderr}"


def found(run_dir: Path) -> Serving:
    """The stack of that run directory, which is up."""
    state = json.loads((run_dir / "state.json").read_text())
    credentials = json.loads((run_dir / "credentials.json").read_text())
    return Serving(f"{state['url']}/v1", credentials["api_key"], state["model"])


@contextmanager
def serving(run_dir: Path) -> Iterator[Serving]:
    """A stack for the length of the block; no process of it is left."""
    try:
        _command("up", run_dir, "--detach", "--port=0", "--nats-port=0", "--workers=1", limit_s=START_S)
        yield found(run_dir)
    finally:
        _command("down", run_dir, limit_s=STOP_S)
