"""Prompts and answers on workers of their own, live: every answer arrives whole and unchanged."""

import asyncio
import time
from pathlib import Path

import httpx
import pytest

from tests.stack.client import Answer, Question, assert_same
from tests.stack.conftest import stack_of
from tests.stack.prompts import long_questions
from tests.stack.running import RunningStack, running_stack

pytestmark = pytest.mark.stack
STREAMS = 8


def questions() -> list[Question]:
    """Prompts of some hundred tokens, answers that outlast a hand-over."""
    return long_questions(STREAMS, least_tokens=200, step_tokens=8, longest_words=320, seed=7)


SETTINGS = ("placement.roles=prefill,decode,decode", "placement.log_level=debug")
trio = stack_of("trio", workers=3, settings=SETTINGS)
"""One worker for prompts, two for answers."""


@pytest.fixture(scope="module")
def undisturbed(stack: RunningStack) -> list[Answer]:
    """As a stack without roles gives them."""
    return stack.answers(questions())


def roles(stack: RunningStack) -> dict[str, str]:
    return {row["worker"]: row["role"] for row in stack.details("placement-0")["workers"]}


def test_answers_are_handed_over_and_stay_the_same(trio: RunningStack, undisturbed: list[Answer]) -> None:
    assert sorted(roles(trio).values()) == ["decode", "decode", "prefill"]
    assert_same(asyncio.run(trio.client().ask_all(questions())), undisturbed)
    deadline_s = time.monotonic() + 10
    while (told := trio.details("placement-0"))["hand_overs"] < STREAMS // 2:
        assert time.monotonic() < deadline_s, told
        time.sleep(0.2)
    logs = trio.command("logs", "placement-0").stdout
    line = next(line for line in logs.splitlines() if "hand-over" in line)
    assert "costs_s" in line and "stays_s" in line, line


async def killed(stack: RunningStack, undisturbed: list[Answer], role: str, after: int) -> None:
    """All streams at once; a worker of that role is killed when so many chunks have come."""
    victim = next(name for name, its in roles(stack).items() if its == role)
    assert_same(await stack.ask_and_kill(questions(), after, victim), undisturbed)
    deadline_s = time.monotonic() + 10
    while len(roles(stack)) < 3:
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(("role", "after"), [("prefill", 2), ("decode", 60)])
async def test_killed(trio: RunningStack, undisturbed: list[Answer], role: str, after: int) -> None:
    """The worker for prompts while it computes some, one for answers while it writes some."""
    await killed(trio, undisturbed, role, after)


@pytest.mark.slow
@pytest.mark.parametrize(("role", "first"), [("prefill", 1), ("decode", 40)])
@pytest.mark.parametrize("five", range(4))
async def test_killed_again_and_again(
    trio: RunningStack, undisturbed: list[Answer], role: str, first: int, five: int
) -> None:
    for turn in range(5):
        await killed(trio, undisturbed, role, first + 3 * (5 * five + turn))


def test_a_fleet_without_a_role_refuses_at_once_and_says_so(tmp_path: Path) -> None:
    settings = ("placement.roles=decode,decode",)
    with running_stack(tmp_path / "run", workers=2, settings=settings) as decoders:
        time.sleep(1.5)
        began_s = time.monotonic()
        answer = httpx.post(
            f"{decoders.url}/v1/chat/completions",
            headers={"Authorization": f"Bearer {decoders.key}"},
            json={"model": decoders.model.name, "messages": [{"role": "user", "content": "Hello!"}]},
            timeout=20,
        )
        assert answer.status_code == 503, answer.text
        assert "compute prompts" in answer.json()["error"]["message"] and time.monotonic() - began_s < 2.0


@pytest.mark.parametrize(("value", "hint"), [("prefil", "prefill, decode"), ("sometimes", "adaptive, both")])
def test_an_unknown_role_stops_the_start(tmp_path: Path, value: str, hint: str) -> None:
    done = RunningStack(tmp_path / "run").command("up", "--set", f"placement.roles={value}")
    assert done.returncode != 0 and hint in done.stdout + done.stderr
