"""More requests longer than one worker's KV than the workers can hold at once, live: all are answered."""

import asyncio
import random

import pytest

from tests.patience import STACK_PATIENCE_S
from tests.stack.client import Answer, Question
from tests.stack.conftest import stack_of
from tests.stack.prompts import passage
from tests.stack.running import RunningStack
from tests.stack.small_workers import OWN_TOKENS, SETTINGS
from tests.stack.watch import watching

pytestmark = pytest.mark.stack
WORKERS, REQUESTS = 2, 3
TIMES_OWN = 1.55
"""What each prompt is of a worker's KV: with its answer almost all that both workers have."""
FIELDS = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}


def questions() -> list[Question]:
    words = int(TIMES_OWN * OWN_TOKENS / 1.19)
    return [Question(passage(words, random.Random(seed)), FIELDS) for seed in range(REQUESTS)]


two = stack_of("two", workers=WORKERS, settings=SETTINGS)


@pytest.fixture(scope="module")
def expected(roomy: RunningStack) -> list[Answer]:
    """What one worker says that holds it all."""
    return asyncio.run(roomy.client().ask_all(questions()))


@pytest.mark.parametrize("turn", range(2))
@pytest.mark.slow  # on virtual time in every run: test_long_requests_cores
async def test_long_requests_at_once_are_answered(
    two: RunningStack, expected: list[Answer], turn: int
) -> None:
    async with asyncio.timeout(STACK_PATIENCE_S):
        answers = await two.client().ask_all(questions())
    assert all(answer.complete for answer in answers), f"turn {turn}: {answers}\n{two.logs()}"
    assert [answer.text for answer in answers] == [answer.text for answer in expected]
    async with watching(two) as watch:
        await watch.until(
            lambda seen: len(seen) == WORKERS and not any(row["lent_blocks"] for row in seen.values()),
            expected=WORKERS,
        )
