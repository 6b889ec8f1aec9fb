"""docs/examples/own_scheduler.py takes the scheduler's place in a real stack, and says so in few lines."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.stack.client import Answer, Question
from tests.stack.running import RunningStack, running_stack

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "docs" / "examples" / "own_scheduler.py"
STACK = pytest.mark.stack
GREEDY = {"temperature": 0, "max_tokens": 120}


@contextmanager
def own_scheduler(stack: RunningStack) -> Iterator["subprocess.Popen[bytes]"]:
    """The example as a person would start it, gone afterwards; returns when the gateway has heard of it."""
    child = subprocess.Popen([sys.executable, str(EXAMPLE), str(stack.run_dir)], cwd=stack.run_dir)
    try:
        deadline_s = time.monotonic() + 30
        while httpx.get(f"{stack.url}/ready").status_code != 200:
            assert child.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.1)
        yield child
    finally:
        child.kill()
        child.wait()


def ask(stack: RunningStack, count: int) -> list[Answer]:
    prompts = ("Tell me a long story about a king.", "What can you do?", "Explain why the sky is blue.")
    questions = [Question(prompts[at % len(prompts)], dict(GREEDY)) for at in range(count)]
    return asyncio.run(stack.client().ask_all(questions))


@STACK
def test_it_serves_chats_in_place_of_the_scheduler(tmp_path: Path) -> None:
    with running_stack(tmp_path / "run", flags=("--without", "scheduler")) as stack:
        names = {row["service"] for row in stack.status()["services"]}
        assert "scheduler" not in names and "worker" in names
        assert httpx.get(f"{stack.url}/ready").status_code == 503
        with own_scheduler(stack) as child:
            answers = ask(stack, 24)
            assert child.poll() is None
        assert all(answer.complete for answer in answers)
        assert {answer.text for answer in answers[:3]} == {answer.text for answer in answers}
