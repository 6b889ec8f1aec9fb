"""A stack whose workers compute nothing: four of them, memory for a third of the load, and kills."""

import asyncio

import pytest

from services.worker.engine.simulated import answer_tokens
from tests.stack.client import Answer, Question, assert_same
from tests.stack.conftest import stack_of
from tests.stack.prompts import mixed
from tests.stack.running import RunningStack

pytestmark = pytest.mark.stack
STREAMS = 48
SETTINGS = ("worker.kv_blocks=96", "worker.simulated.speed=20")
FLAGS = ("--engine", "simulated")
QUESTIONS = [
    Question(prompt, {"seed": seed, "max_tokens": 400})
    for seed, prompt in enumerate(mixed(STREAMS, longest_words=300, seed=2))
]
stack = stack_of("stack", workers=4, settings=SETTINGS, flags=FLAGS)


@pytest.fixture(scope="module")
def undisturbed(stack: RunningStack) -> list[Answer]:
    return asyncio.run(stack.client().ask_all(QUESTIONS))


def test_answers_are_as_long_as_their_seeds_say(undisturbed: list[Answer]) -> None:
    assert all(answer.complete for answer in undisturbed), [answer.errors for answer in undisturbed]
    lengths = [min(400, answer_tokens(seed, 0)) for seed in range(STREAMS)]
    assert [answer.completion_tokens for answer in undisturbed] == lengths


@pytest.mark.parametrize("name", ["worker-2", "scheduler-0"])
async def test_killed(stack: RunningStack, undisturbed: list[Answer], name: str) -> None:
    assert_same(await stack.ask_and_kill(QUESTIONS, 400, name), undisturbed)
