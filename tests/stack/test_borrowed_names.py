"""Borrowed blocks have names, live: a long prompt that comes again finds also what others hold of it."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.stack.client import Answer, Question
from tests.stack.prompts import passage
from tests.stack.running import RunningStack, running_stack
from tests.stack.small_workers import (
    BLOCK_TOKENS,
    BLOCKS,
    OWN_TOKENS,
    SETTINGS,
    STAGED_BLOCKS,
    until_announced,
)

pytestmark = pytest.mark.stack
CACHED = ("worker.prefix_cache.enabled=true", "worker.host_memory.cache_share=0")
LONGEST_TOKENS = 2 * (BLOCKS - STAGED_BLOCKS - 1) * BLOCK_TOKENS


async def ask_twice(stack: RunningStack, question: Question) -> list[Answer]:
    await until_announced(stack, LONGEST_TOKENS)
    return [answer for _ in range(2) for answer in await stack.client().ask_all([question])]


def test_a_long_prompt_asked_again_is_found_at_its_creditors(tmp_path: Path, roomy: RunningStack) -> None:
    """Nothing of it fits on a host: what it finds beyond a worker's own KV is borrowed, or came home."""
    text = passage(int(1.5 * OWN_TOKENS / 1.19), random.Random(5))
    fields = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    question = Question(text, fields)
    (expected,) = asyncio.run(roomy.client().ask_all([question]))
    with running_stack(tmp_path / "run", workers=2, settings=(*SETTINGS, *CACHED)) as two:
        first, again = asyncio.run(ask_twice(two, question))
        told = [two.details(name) for name in ("worker-0", "worker-1")]
    assert [first.text, again.text] == [expected.text] * 2, two.logs()
    assert first.cached_tokens == 0 and again.cached_tokens >= OWN_TOKENS + BLOCK_TOKENS
    at_creditors = sum(each["prefix_hits_borrowed"] for each in told)
    assert at_creditors + sum(each["recalled_blocks"] for each in told) > 0, told
