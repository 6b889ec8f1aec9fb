"""The stack that the clients talk to: started as a user would start it, on free ports, and ended."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.tasks import ran

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv" / "bin" / "python"
"""The stack's own interpreter: the clients' environment knows nothing of it."""
SUFFIX = "-newest" if os.environ.get("KVASIR_CLIENTS") == "newest" else ""
"""How the names of the clients' environments end."""
START_S, STOP_S = 150, 60
LONG_TOKENS = 131_072


@dataclass(frozen=True)
class Serving:
    """Where a stack answers."""

    base_url: str
    key: str
    model: str


def _command(word: str, run_dir: Path, *flags: str, limit_s: int) -> None:
    done = ran([PYTHON, "-m", "services", word, "--run-dir", run_dir, *flags], timeout=limit_s)
    assert done.returncode == 0, f"{word}: {done.returncode}\n{done.stdout}\n{done.stderr}"


def found(run_dir: Path) -> Serving:
    """The stack of that run directory, which is up."""
    state = json.loads((run_dir / "state.json").read_text())
    credentials = json.loads((run_dir / "credentials.json").read_text())
    return Serving(f"{state['url']}/v1", credentials["api_key"], state["model"])


def long_model(folder: Path) -> Path:
    """A copy of the model that ships, with a context of `LONG_TOKENS`.

    It has the first two layers, so that a prompt of 30,000 tokens takes a quarter of the time.
    """
    shutil.copytree(ROOT / "models" / "tiny_chat", folder)
    fields = {"max_position_embeddings": LONG_TOKENS, "num_hidden_layers": 2}
    for name, changed in (("config", fields), ("tokenizer_config", {"model_max_length": LONG_TOKENS})):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    return folder


@contextmanager
def serving(run_dir: Path, *flags: str) -> Iterator[Serving]:
    """A stack for the length of the block; no process of it is left."""
    free = ("--detach", "--port=0", "--nats-port=0", "--workers=1")
    try:
        _command("up", run_dir, *free, *flags, limit_s=START_S)
        yield found(run_dir)
    finally:
        _command("down", run_dir, limit_s=STOP_S)
