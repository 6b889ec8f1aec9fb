"""Policies and mechanisms together in real stacks, under one mixed load in short memory: all is served.

A few of them in every run; all, and all pairs, where one has the time. Throughput is compared on virtual time
(`test_combinations_cores`), where it does not depend on the machine.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.patience import STACK_PATIENCE_S
from tests.stack.client import Question
from tests.stack.mixed_world import OFF_DEFAULT, PAIRS, Element, name_of
from tests.stack.prompts import mixed
from tests.stack.running import running_stack

pytestmark = pytest.mark.stack
QUESTIONS = 24
SETTINGS: dict[str, tuple[str, ...]] = {
    "policy": ("scheduler.policy={}",),
    "placement": ("placement.policy={}",),
    "order": ("placement.order={}",),
    "cached": ("worker.prefix_cache.enabled=false",),
    "lends": ("worker.lending.borrow=true", "worker.lending.max_lent_fraction=1"),
    "relief": ("scheduler.relief=true",),
    "scale": ("placement.policy=mell", "placement.scale=true", "placement.idle_s=0.5"),
    "pie": ("worker.pie.enabled=true",),
}
PIE, SCALE = ("pie", True), ("scale", True)
FEW: list[tuple[Element, ...]] = [
    (("placement", "mell"), ("lends", True)),
    (("lends", True), ("relief", True), PIE),
]
WITH_PIE = [(PIE, one) for one in OFF_DEFAULT]
WITH_SCALE = [(SCALE, one) for one in OFF_DEFAULT if one[0] != "placement"]


def serve(folder: Path, elements: tuple[Element, ...]) -> None:
    """Twice the same: the second time the caches know it."""
    asked = mixed(QUESTIONS, longest_words=500, seed=4)
    fields: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    questions = [
        Question(prompt, {**fields, "max_tokens": 20 + 6 * number}) for number, prompt in enumerate(asked)
    ]
    settings = [form.format(value) for name, value in elements for form in SETTINGS[name]]

    async def ask(client: Any) -> list[Any]:
        async with asyncio.timeout(STACK_PATIENCE_S):
            return list(await client.ask_all(questions))

    with running_stack(folder / "run", settings=("worker.kv_blocks=64", *settings)) as stack:
        for _ in range(2):
            answers = asyncio.run(ask(stack.client()))
            assert all(answer.complete for answer in answers), [answer.errors for answer in answers]


@pytest.mark.parametrize("elements", FEW, ids=name_of)
def test_a_few_together(tmp_path: Path, elements: tuple[Element, ...]) -> None:
    serve(tmp_path, elements)


@pytest.mark.slow
@pytest.mark.parametrize(
    "elements", [*((one,) for one in (*OFF_DEFAULT, PIE)), *PAIRS, *WITH_PIE, *WITH_SCALE], ids=name_of
)
def test_all_pairs(tmp_path: Path, elements: tuple[Element, ...]) -> None:
    serve(tmp_path, elements)
