"""Memory runs out and sequences wait on the host: every answer is what it is with memory enough."""

import asyncio

import pytest

from tests.stack.client import Answer, Question, assert_same
from tests.stack.conftest import stack_of
from tests.stack.prompts import long_questions
from tests.stack.running import BLOCK_TOKENS, RunningStack

pytestmark = pytest.mark.stack
STREAMS = 8
SMALL = (
    f"worker.kv_blocks={56 * 16 // BLOCK_TOKENS}",
    "scheduler.policy=vllm",
    "scheduler.relief=true",
    "worker.host_memory.blocks=256",
    "worker.host_memory.cache_share=1",
    "worker.pie.enabled=false",  # which might make room instead
)
"""About three of the answers fit to their end."""


def questions() -> list[Question]:
    return long_questions(STREAMS, least_tokens=160, step_tokens=6, longest_words=120, seed=9)


@pytest.fixture(scope="module")
def expected(roomy: RunningStack) -> list[Answer]:
    return roomy.answers(questions())


crowded = stack_of("crowded", workers=1, settings=SMALL)


def test_swapped_and_back(crowded: RunningStack, expected: list[Answer]) -> None:
    assert_same(asyncio.run(crowded.client().ask_all(questions())), expected)
    scheduler, worker = crowded.details("scheduler-0"), crowded.details("worker-0")
    assert scheduler["preempted_swap"] > 0, scheduler
    assert worker["swaps"] > 0 and worker["swapped_blocks"] == 0, worker
    from_host = next(row for row in worker["prefix_tiers"] if row["tier"] == "host")
    assert from_host["hits"] > 0, worker


async def test_killed_while_some_wait_on_the_host(crowded: RunningStack, expected: list[Answer]) -> None:
    assert_same(await crowded.ask_and_kill(questions(), 300, "worker-0"), expected)
