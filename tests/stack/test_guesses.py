"""Workers guess tokens from the text so far: every answer is what it is without, though a worker dies."""

import asyncio
from typing import Any

import pytest

from tests.stack.client import Question, assert_same
from tests.stack.conftest import stack_of
from tests.stack.prompts import ASKED
from tests.stack.running import RunningStack

pytestmark = pytest.mark.stack
guessing = stack_of("guessing", workers=2, settings=("worker.lookup_tokens=11", "worker.kv_blocks=96"))


def questions() -> list[Question]:
    """Answers that go on until they repeat themselves; some are drawn, or penalised for repeating."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.4, "seed": 3},
        {"temperature": 0, "frequency_penalty": 0.2},
    ]
    fields = {"max_tokens": 400, "ignore_eos": True}
    return [Question(ASKED[at], fields | ways[at % len(ways)]) for at in range(6)]


def test_guesses_change_no_answer(guessing: RunningStack, roomy: RunningStack) -> None:
    expected = roomy.answers(questions())
    assert_same(asyncio.run(guessing.ask_and_kill(questions(), 900, "worker-1")), expected)
    worker = guessing.details("worker-0")
    assert worker["kept_guesses"] > 20 and worker["wrong_guesses"] > 0, worker
