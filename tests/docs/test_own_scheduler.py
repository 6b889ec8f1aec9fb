"""docs/examples/own_scheduler.py takes the scheduler's place in a real stack, and says so in few lines."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.stack.client import Answer, Question
from tests.stack.running import RunningStack, running_stack

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "docs" / "examples" / "own_scheduler.py"
STACK = pytest.mark.stack
GREEDY = {"temperature": 0, "max_tokens": 120}
PROMPTS = ("Tell me a long story about a king.", "What can you do?", "Explain why the sky is blue.")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    run_dir = tmp_path_factory.mktemp("own") / "run"
    with running_stack(run_dir, flags=("--without", "scheduler")) as stack:
        yield stack


@contextmanager
def own_scheduler(stack: RunningStack) -> Iterator["subprocess.Popen[bytes]"]:
    """The example as a person would start it, killed afterwards; returns when the gateway has heard of it."""
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


def ask(stack: RunningStack, count: int, midway: Callable[[], Awaitable[None]] | None = None) -> list[Answer]:
    questions = [Question(PROMPTS[at % len(PROMPTS)], dict(GREEDY)) for at in range(count)]
    return asyncio.run(stack.client().ask_all(questions, midway=midway, after=4 * count))


def assert_alike(answers: list[Answer]) -> None:
    """Whole answers, the same to the same question."""
    assert [answer.errors for answer in answers if not answer.complete] == []
    assert {answer.text for answer in answers[:3]} == {answer.text for answer in answers}
    assert all(len(answer.text) > 20 for answer in answers)


def test_it_is_as_short_as_the_docs_say() -> None:
    lines = sum(bool(line.strip()) for line in EXAMPLE.read_text().splitlines())
    for page in ("own-scheduler.md", "recipes.md"):
        assert f"{lines} lines" in (ROOT / "docs" / page).read_text()


@STACK
def test_it_serves_chats_in_place_of_the_scheduler(stack: RunningStack) -> None:
    names = {row["service"] for row in stack.status()["services"]}
    assert "scheduler" not in names and "worker" in names
    assert httpx.get(f"{stack.url}/ready").status_code == 503
    with own_scheduler(stack) as child:
        answers = ask(stack, 24)
        assert child.poll() is None
    assert_alike(answers)


@STACK
def test_it_may_be_killed_in_mid_answer_and_started_again(stack: RunningStack) -> None:
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(own_scheduler(stack))

        async def start_anew() -> None:
            first.close()
            await asyncio.sleep(0.3)
            await asyncio.to_thread(second.enter_context, own_scheduler(stack))

        assert_alike(ask(stack, 24, start_anew))


@STACK
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_may_die_under_it_or_freeze(stack: RunningStack, number: signal.Signals) -> None:
    restarts = int(stack.child("worker-1")["restarts"])
    with own_scheduler(stack) as child:

        async def strike() -> None:
            stack.signal("worker-1", number)

        try:
            assert_alike(ask(stack, 24, strike))
            assert child.poll() is None
        finally:
            stack.signal("worker-1", signal.SIGCONT)
        if number is signal.SIGKILL:
            stack.until_restarted("worker-1", restarts=restarts + 1)
        assert_alike(ask(stack, 6))
