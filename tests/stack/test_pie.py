"""Pie beside the prefix cache in a real stack: long prompts, and the texts of a large worker."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.patience import STACK_PATIENCE_S
from tests.stack.client import Question
from tests.stack.prompts import mixed
from tests.stack.running import running_stack

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


def texts_of(folder: Path, *settings: str) -> tuple[list[str], dict[str, Any]]:
    """Of two rounds; and what the worker says of itself."""

    async def ask(client: Any) -> list[Any]:
        async with asyncio.timeout(STACK_PATIENCE_S):
            return list(await client.ask_all(asked()))

    with running_stack(folder, workers=1, settings=settings) as stack:
        answers = [each for _ in range(2) for each in asyncio.run(ask(stack.client()))]
        assert all(each.complete for each in answers), [each.errors for each in answers]
        return [each.text for each in answers], stack.details("worker-0")


def test_prompts_longer_than_the_device_are_answered_as_by_a_large_worker(tmp_path: Path) -> None:
    expected, _ = texts_of(tmp_path / "large", *LARGE)
    texts, details = texts_of(tmp_path / "small", *SMALL)
    assert texts == expected
    assert details["pie_fifo_layers"] > 0 and sum(tier["hits"] for tier in details["prefix_tiers"]) > 0
