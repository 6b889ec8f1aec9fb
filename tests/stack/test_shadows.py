"""A long answer whose worker is killed goes on where another worker has copies of its KV, and is the same."""

import random
import signal

import pytest

from tests.stack.client import Question, assert_same
from tests.stack.conftest import stack_of
from tests.stack.prompts import passage
from tests.stack.running import BLOCK_TOKENS, RunningStack
from tests.stack.watch import Seen, watching

pytestmark = pytest.mark.stack
PROMPT_WORDS, ANSWER_TOKENS = 1000, 600
PROMPT_BLOCKS = PROMPT_WORDS // BLOCK_TOKENS
"""At least: a word is a token or more."""
SHADOWED = ("scheduler.shadow_from_s=0.001", "worker.transfer.shadow_link_share=1")
"""This model computes such a prompt within a fifth of a second, which is not worth a copy by default."""


def question() -> Question:
    fields = {"max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0}
    return Question(passage(PROMPT_WORDS, random.Random(11)), fields)


pair = stack_of("pair", settings=SHADOWED)


def told(seen: Seen, name: str, what: str) -> int:
    return int(seen[name].get(what, 0))


async def test_a_killed_workers_answer_goes_on_from_copies(pair: RunningStack, roomy: RunningStack) -> None:
    expected = await roomy.client().ask_all([question()])
    keepers: list[str] = []

    async with watching(pair) as watch:

        async def kill_its_worker() -> None:
            seen = await watch.ask("worker", 2)
            victim = next(name for name in seen if told(seen, name, "sequences"))
            keeper = next(name for name in seen if name != victim)
            await watch.until(lambda s: keeper in s and told(s, keeper, "shadow_blocks") >= PROMPT_BLOCKS)
            keepers.append(keeper)
            pair.signal(victim, signal.SIGKILL)

        answers = await pair.client().ask_all([question()], midway=kill_its_worker, after=5)
    assert_same(answers, expected)
    details = pair.details(keepers[0])
    used = int(details["shadows_used"])
    hits = {row["tier"]: row["hits"] for row in details["prefix_tiers"]}
    assert used >= PROMPT_BLOCKS and hits["host"] == used
    assert int(details["fetched_as_shadows_blocks"]) >= used
