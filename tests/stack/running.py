"""A whole stack as real processes, started as by the command that a user types (`tests.stack.warm`)."""

import asyncio
import io
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import openai
from rich.console import Console

from services.stack.down import down
from services.stack.obstructions import free_port
from services.stack.rundir import RunDirectory
from services.stack.status import status
from tests.patience import STACK_PATIENCE_S
from tests.stack.client import Answer, Client, Question
from tests.stack.warm import Running, warm

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
        self._run = RunDirectory(run_dir)
        self._running: Running | None = None
        self.model = model
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`kvasir WORDS` against this run directory, to its end."""
        argv = [words[0], "--run-dir", str(self.run_dir), *words[1:]]
        with TemporaryDirectory() as folder:
            out, errors = Path(folder, "out"), Path(folder, "errors")
            code = warm().run(argv, out, errors).code(_COMMAND_S)
            assert code is not None, f"{argv} did not end within {_COMMAND_S:g} s\n{errors.read_text()}"
            return subprocess.CompletedProcess(argv, code, out.read_text(), errors.read_text())

    def start(self, *, workers: int = 2, settings: tuple[str, ...] = (), flags: tuple[str, ...] = ()) -> None:
        ports = [f"--port={self.port}", f"--nats-port={free_port()}"]
        words = ["up", "--run-dir", str(self.run_dir), *ports]
        words += ["--workers", str(workers), "--model", str(self.model), *flags]
        if not any(setting.startswith("worker.kv_b") for setting in settings):
            settings = (*settings, "worker.kv_blocks=1024")  # the same on all, whatever else has memory here
        if not any(setting.startswith("scheduler.refuse_wait_s") for setting in settings):
            settings = (*settings, "scheduler.refuse_wait_s=0")  # slow machines foresee long waits
        for setting in settings:
            words += ["--set", setting]
        self._run.create()
        log = self.run_dir / "supervisor.log"
        self._running = warm().run(words, log, log)
        while True:
            code, state = self._running.code(0.02), self._run.read_state()
            assert code is None, f"the start ended with {code}: {log.read_text()}\n{self.logs()}"
            if (state.get("pid"), state.get("phase")) == (self._running.pid, "ready"):
                return

    def stop(self) -> None:
        said = io.StringIO()
        assert down(self._run, Console(file=said)) == 0, said.getvalue()
        assert self._running is None or self._running.code(_COMMAND_S) is not None

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
        """SIGCONT for one that was replaced while it stood still does nothing."""
        pid = self.child(name)["pid"]
        if pid is not None or number != signal.SIGCONT:
            os.kill(int(pid), number)

    def status(self) -> dict[str, Any]:
        """What `kvasir status --json` prints."""
        said = io.StringIO()
        work = status(self._run, Console(file=said), as_json=True)
        with ThreadPoolExecutor(1) as apart:  # whoever asks may have an event loop
            assert apart.submit(asyncio.run, work).result(_COMMAND_S) == 0, said.getvalue()
        return dict(json.loads(said.getvalue()))

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

    def openai_client(self) -> openai.OpenAI:
        """OpenAI's client of it, for the length of a `with` block."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self.key, timeout=STACK_PATIENCE_S, max_retries=0
        )

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """To all questions at once, each whole."""
        found = asyncio.run(self.client().ask_all(questions))
        assert all(answer.complete for answer in found), [answer.errors for answer in found]
        return found

    async def ask_and_kill(self, questions: Sequence[Question], after: int, *victims: str) -> list[Answer]:
        """Answers during which these processes are killed, once so many chunks have come. All come back."""
        before = {name: self.child(name)["restarts"] for name in victims}

        async def kill() -> None:
            for name in victims:
                self.signal(name, signal.SIGKILL)

        answers = await self.client().ask_all(questions, midway=kill, after=after)
        for name, restarts in before.items():
            await asyncio.to_thread(self.until_restarted, name, restarts=restarts + 1)
        return answers

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
