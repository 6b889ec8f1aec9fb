"""Greedy text through the whole stack is what transformers' `generate` gives, also under preemption."""

from pathlib import Path

import pytest

from tests.stack.client import Question
from tests.stack.prompts import ASKED, STORIES, mixed
from tests.stack.reference import Reference, ReferenceModel
from tests.stack.running import TINY_CHAT, running_stack

pytestmark = pytest.mark.stack
PROMPTS = mixed(50, longest_words=600, asked=(*ASKED, *STORIES, *STORIES))
MAX_TOKENS = 128
TIGHT = "worker.kv_blocks=56"
"""896 tokens a worker: the longest prompt and its answer just fit, alone."""


@pytest.fixture(scope="module")
def references() -> list[Reference]:
    model = ReferenceModel(TINY_CHAT)
    return [model.greedy(prompt, MAX_TOKENS) for prompt in PROMPTS]


async def test_fifty_prompts_under_preemption(tmp_path: Path, references: list[Reference]) -> None:
    questions = [Question(prompt, {"temperature": 0, "max_tokens": MAX_TOKENS}) for prompt in PROMPTS]
    with running_stack(tmp_path / "run", settings=(TIGHT,)) as stack:
        answers = await stack.client().ask_all(questions)
        preemptions = stack.details("scheduler-0")["preemptions"]
    assert all(answer.complete for answer in answers)
    model = ReferenceModel(TINY_CHAT)
    different = [
        (answer.text, reference.text)
        for answer, reference in zip(answers, references, strict=True)
        if answer.text != reference.text and not model.is_near_tie(reference, answer.text)
    ]
    assert different == []
    assert preemptions > 0
    near_ties = sum(a.text != r.text for a, r in zip(answers, references, strict=True))
    assert near_ties <= 1
