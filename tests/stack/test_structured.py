"""Structured answers on a whole stack: valid, refused before any work, the same when workers are killed."""

import json
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.patience import STACK_PATIENCE_S
from tests.stack.client import Answer, Question, assert_same
from tests.stack.running import RunningStack, running_stack

pytestmark = pytest.mark.stack
STREAMS = 16
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "year": {"type": "integer"},
        "parts": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["title", "year", "parts"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "book", "strict": True, "schema": SCHEMA}}


def question(at: int) -> Question:
    """Different ones: penalties, seeds, greedy ones, long and short limits."""
    fields: dict[str, Any] = {
        "max_tokens": (60, 120, 240)[at % 3],
        "temperature": (0.0, 0.8, 1.0)[at % 3],
        "seed": at,
        "frequency_penalty": 0.5 * (at % 2),
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "book", "strict": True, "schema": SCHEMA},
        },
    }
    return Question(f"Tell me about book number {at}.", fields)


def check(answers: list[Answer]) -> None:
    for answer in answers:
        assert answer.finish_reason == "stop", answer
        jsonschema.validate(json.loads(answer.text), SCHEMA)


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with running_stack(tmp_path_factory.mktemp("structured") / "run") as running:
        yield running


async def test_answers_keep_their_form_when_a_worker_is_killed(victim: RunningStack) -> None:
    questions = [question(at) for at in range(STREAMS)]
    undisturbed = await victim.client().ask_all(questions)
    check(undisturbed)
    for restarts, name in enumerate(("worker-0", "worker-1", "worker-0")):

        async def kill(name: str = name) -> None:
            victim.signal(name, signal.SIGKILL)

        answers = await victim.client().ask_all(questions, midway=kill, after=STREAMS * 12)
        assert_same(answers, undisturbed)
        check(answers)
        victim.until_restarted(name, restarts=1 + restarts // 2)


def test_refused_before_any_work(victim: RunningStack) -> None:
    body = {
        "model": victim.model.name,
        "messages": [{"role": "user", "content": "hi"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}},
    }
    headers = {"Authorization": f"Bearer {victim.key}"}
    refused = httpx.post(f"{victim.url}/v1/chat/completions", json=body, headers=headers)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (
        error["param"] == "response_format.json_schema.schema" and "not is not supported" in error["message"]
    )


class Dog(BaseModel):
    name: str
    age: int


def test_parse_of_the_openai_client(victim: RunningStack) -> None:
    url = f"{victim.url}/v1"
    with openai.OpenAI(base_url=url, api_key=victim.key, timeout=STACK_PATIENCE_S) as client:
        parsed = client.chat.completions.parse(
            model=victim.model.name,
            messages=[{"role": "user", "content": "Invent a dog."}],
            response_format=Dog,
            n=2,
            seed=7,
            max_tokens=64,
            logprobs=True,
        )
    for choice in parsed.choices:
        assert isinstance(choice.message.parsed, Dog)
