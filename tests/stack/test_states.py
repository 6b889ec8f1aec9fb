"""Lengths learned while answering, as real processes: states go to the predictor, lengths to plans."""

import time
from typing import Any

import pytest

from tests.patience import STACK_PATIENCE_S
from tests.stack.client import Question
from tests.stack.conftest import stack_of
from tests.stack.prompts import mixed
from tests.stack.running import RunningStack

pytestmark = pytest.mark.stack
SETTINGS = ("worker.states_every=4", "worker.kv_blocks=256")
QUESTIONS = [
    Question(prompt, {"seed": seed, "max_tokens": 40, "temperature": 0.8})
    for seed, prompt in enumerate(mixed(160, longest_words=40, seed=4))
]
stack = stack_of("stack", workers=1, settings=SETTINGS)


def details(stack: RunningStack, service: str) -> dict[str, Any]:
    rows = [row for row in stack.status()["services"] if row["service"] == service]
    found: dict[str, Any] = rows[0]["details"]
    return found


def test_answers_teach_the_head_and_nothing_is_lost(stack: RunningStack) -> None:
    stack.answers(QUESTIONS)
    deadline_s = time.monotonic() + STACK_PATIENCE_S
    while (learned := details(stack, "predictor")["revised tiny_chat"])["under_way"] >= 16:
        assert time.monotonic() < deadline_s, learned  # ends are worked off after the answers are read
        time.sleep(0.1)
    assert learned["answers"] > 100 and {"head_error_tokens", "base_error_tokens"} <= learned.keys()
    assert learned["is_told"] == (learned["head_error_tokens"] < learned["base_error_tokens"])
    assert details(stack, "scheduler")["queued"] == 0
