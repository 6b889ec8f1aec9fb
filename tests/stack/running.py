"""A whole stack as real processes, started with the command that a user types."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.stack.obstructions import free_port
from tests.patience import STACK_PATIENCE_S
from tests.stack.client import Client

ROOT = Path(__file__).resolve().parents[2]
TINY_CHAT = ROOT / "models" / "tiny_chat"
_COMMAND_S = 240.0
"""A net for what hangs: two vLLM workers want most of a minute of two cores, which other things may have."""
BLOCK_TOKENS = 32 if os.environ.get("KVASIR_WORKER__ENGINE") == "vllm" else 16
"""Of the stacks' workers: `make test-vllm` runs these tests with vLLM's."""


class RunningStack:
    """One stack in a run directory of its own."""

    def __init__(self, run_dir: Path, model: Path = TINY_CHAT) -> None:
        self.run_dir = run_dir
        self.model = model
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`python -m services WORDS` against this run directory, to its end."""
        argv = [sys.executable, "-m", "services", words[0], "--run-dir", str(self.run_dir), *words[1:]]
        return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=_COMMAND_S, check=False)

    def start(self, *, workers: int = 2, settings: tuple[str, ...] = (), flags: tuple[str, ...] = ()) -> None:
        words = ["--detach", "--port", str(self.port), "--nats-port", str(free_port())]
        words += ["--workers", str(workers), "--model", str(self.model), *flags]
        if not any(setting.startswith("worker.kv_b") for setting in settings):
            settings = (*settings, "worker.kv_blocks=1024")  # the same on all, whatever else has memory here
        if not any(setting.startswith("scheduler.refuse_wait_s") for setting in settings):
            settings = (*settings, "scheduler.refuse_wait_s=0")  # slow machines foresee long waits
        for setting in settings:
            words += ["--set", setting]
        done = self.command("up", *words)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{self.logs()}"

    def stop(self) -> None:
        done = self.command("down")
        assert done.returncode == 0, done.stdout + done.stderr

    @property
    def key(self) -> str:
        return str(json.loads((self.run_dir / "credentials.json").read_text())["api_key"])

    def client(self) -> Client:
        return Client(self.url, self.key, self.model.name)

    @property
    def operator_url(self) -> str:
        """Where health and metrics are."""
        url: str = json.loads((self.run_dir / "state.json").read_text())["operator_url"]
        return url

    def child(self, name: str) -> dict[str, Any]:
        """The supervisor's row for one child: pid, state, restarts."""
        state = json.loads((self.run_dir / "state.json").read_text())
        return next(row for row in state["children"] if row["name"] == name)

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(int(self.child(name)["pid"]), number)

    def status(self) -> dict[str, Any]:
        """What `python -m services status --json` prints."""
        done = self.command("status", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        return dict(json.loads(done.stdout))

    def details(self, instance: str) -> dict[str, Any]:
        """The status details of one service instance."""
        services = self.status()["services"]
        return next(dict(row["details"]) for row in services if row["instance"] == instance)

    def until_restarted(self, name: str, *, restarts: int, within_s: float = STACK_PATIENCE_S) -> None:
        """Waits until the supervisor has brought `name` back and every service answers."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            row = self.child(name)
            if row["restarts"] >= restarts and row["state"] == "ready":
                return
            time.sleep(0.1)
        raise AssertionError(f"{name} was not back within {within_s} s: {self.child(name)}\n{self.logs()}")

    def logs(self, lines: int = 12) -> str:
        """The last lines of every log, for a failing test to show."""
        parts = []
        for log in sorted((self.run_dir / "logs").glob("*.log")):
            tail = log.read_text(errors="replace").splitlines()[-lines:]
            parts.append(f"--- {log.name}\n" + "\n".join(tail))
        return "\n".join(parts)


@contextmanager
def running_stack(
    run_dir: Path,
    *,
    model: Path = TINY_CHAT,
    workers: int = 2,
    settings: tuple[str, ...] = (),
    flags: tuple[str, ...] = (),
) -> Iterator[RunningStack]:
    """A stack for the length of a `with` block; it leaves no process behind."""
    stack = RunningStack(run_dir, model)
    try:
        stack.start(workers=workers, settings=settings, flags=flags)
        yield stack
    finally:
        stack.stop()
