"""Pie beside the prefix cache in a real stack: long prompts, and the texts of a large worker."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.patience import STACK_PATIENCE_S
from tests.stack.client import Question
from tests.stack.prompts import mixed
from tests.stack.running import RunningStack, running_stack
from tests.stack.small_workers import announced_tokens

pytestmark = pytest.mark.stack
LARGE = ("worker.kv_blocks=512",)
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


def texts_of(
    folder: Path, questions: list[Question], *settings: str, workers: int = 1, reach_tokens: int = 0
) -> tuple[list[str], dict[str, Any], str]:
    """Of two rounds, asked once workers take so many tokens; what the first worker says of itself; and what
    all have logged."""

    async def ask(stack: RunningStack) -> list[Any]:
        async with asyncio.timeout(STACK_PATIENCE_S):
            while await announced_tokens(stack) < reach_tokens:
                await asyncio.sleep(0.1)
            return [each for _ in range(2) for each in await stack.client().ask_all(questions)]

    with running_stack(folder, workers=workers, settings=settings) as stack:
        answers = asyncio.run(ask(stack))
        assert all(each.complete for each in answers), [each.errors for each in answers]
        logged = "".join(path.read_text() for path in sorted(stack.run_dir.glob("logs/worker-*.log")))
        return [each.text for each in answers], stack.details("worker-0"), logged


def test_prompts_longer_than_the_device_are_answered_as_by_a_large_worker(tmp_path: Path) -> None:
    expected, _, _ = texts_of(tmp_path / "large", asked(), *LARGE)
    texts, details, _ = texts_of(tmp_path / "small", asked(), *SMALL)
    assert texts == expected
    assert details["pie_fifo_layers"] > 0 and sum(tier["hits"] for tier in details["prefix_tiers"]) > 0


def test_what_own_host_memory_cannot_hold_is_borrowed(tmp_path: Path) -> None:
    """Under default settings: workers of 24 blocks, 64 with their host memory, and a prompt of 67."""
    story = "Once upon a time there was a fox who wanted to see the sea. " * 68
    questions = [Question(story, {"temperature": 0, "ignore_eos": True, "max_tokens": 24})]
    expected, _, _ = texts_of(tmp_path / "large", questions, *LARGE)
    texts, _, logged = texts_of(
        tmp_path / "small", questions, "worker.kv_blocks=24", workers=3, reach_tokens=68 * 16
    )
    assert texts == expected
    assert "blocks outside for a sequence" in logged and '"event":"borrowed"' in logged
