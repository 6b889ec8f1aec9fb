"""A GGUF file is served as its folder is, by two workers, with the bits that it has."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import gguf_rig
from tests.stack.client import Answer, Question, assert_same
from tests.stack.running import TINY_CHAT, RunningStack

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("gguf")
    file = gguf_rig.of_folder(folder / "Tiny.Q8_0.gguf", TINY_CHAT, "Q8_0")
    stack = RunningStack(folder / "run", file)
    stack.start(flags=("--served-name", file.name))
    yield stack
    stack.stop()


def test_it_answers_alike_however_often_it_is_asked(stack: RunningStack) -> None:
    questions = [
        Question(f"Tell me story number {number % 4}.", {"max_tokens": 40, "temperature": 0})
        for number in range(8)
    ]
    answers: list[Answer] = asyncio.run(stack.client().ask_all(questions))
    assert_same(answers[4:], answers[:4])
    assert all(len(answer.text) > 40 for answer in answers)


def test_its_weights_are_as_in_the_file(stack: RunningStack) -> None:
    said = Path(stack.run_dir, "logs", "worker-0.log").read_text()
    assert "computes natively" in said and "8 bits 100 %" in said
