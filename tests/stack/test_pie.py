"""Pie beside the prefix cache in a real stack: long prompts, and the texts of a large worker."""

from pathlib import Path
from typing import Any

import pytest

from tests.stack.client import Answer, Question, assert_same
from tests.stack.judge import WITH_IDS, assert_as_good
from tests.stack.prompts import mixed
from tests.stack.running import RunningStack, running_stack
from tests.stack.small_workers import until_announced

pytestmark = pytest.mark.stack
SMALL = ("worker.kv_blocks=48", "worker.pie.enabled=true")
"""Of 8 layers, at most 128 blocks in all: 2,048 tokens."""


def asked() -> list[Question]:
    """A story twice as long as the device's KV between short ones that share beginnings."""
    fields: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    story = "Once upon a time there was a fox who wanted to see the sea. " * 70
    short = [
        Question(prompt, {**fields, "max_tokens": 24 + number})
        for number, prompt in enumerate(mixed(12, longest_words=150, seed=7))
    ]
    return [*short[:6], Question(story, {**fields, "max_tokens": 40}), *short[6:]]


async def asked_twice(stack: RunningStack, questions: list[Question]) -> list[Answer]:
    answers = [each for _ in range(2) for each in await stack.client().ask_all(questions)]
    assert all(each.complete for each in answers), [each.errors for each in answers]
    return answers


async def test_long_prompts_are_answered_as_by_a_large_worker(tmp_path: Path, roomy: RunningStack) -> None:
    with running_stack(tmp_path / "run", workers=1, settings=SMALL) as small:
        answers, wanted = [await asked_twice(each, asked()) for each in (small, roomy)]
        assert_same(answers, wanted)
        details = small.details("worker-0")
    assert details["pie_fifo_layers"] > 0 and sum(tier["hits"] for tier in details["prefix_tiers"]) > 0


async def test_what_own_host_memory_cannot_hold_is_borrowed(tmp_path: Path, roomy: RunningStack) -> None:
    """Under default settings: workers of 24 blocks, 64 with their host memory, and a prompt of 67."""
    story = "Once upon a time there was a fox who wanted to see the sea. " * 68
    questions = [Question(story, {"temperature": 0, "ignore_eos": True, "max_tokens": 24, **WITH_IDS})]
    with running_stack(tmp_path / "run", workers=3, settings=("worker.kv_blocks=24",)) as small:
        await until_announced(small, 68 * 16)
        answers, wanted = [await asked_twice(each, questions) for each in (small, roomy)]
        await assert_as_good(roomy, answers, wanted)
        logged = "".join(path.read_text() for path in sorted(small.run_dir.glob("logs/worker-*.log")))
    assert "blocks outside for a sequence" in logged and '"event":"borrowed"' in logged
