"""Structured answers on a whole stack: valid, refused before any work, the same when workers are killed."""

import json
import signal
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.stack.client import Answer, Question, assert_same
from tests.stack.running import RunningStack

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
        "response_format": FORM,
    }
    return Question(f"Tell me about book number {at}.", fields)


def check(answers: list[Answer]) -> None:
    for answer in answers:
        assert answer.finish_reason == "stop", answer
        jsonschema.validate(json.loads(answer.text), SCHEMA)


async def test_answers_keep_their_form_when_a_worker_is_killed(stack: RunningStack) -> None:
    questions = [question(at) for at in range(STREAMS)]
    undisturbed = await stack.client().ask_all(questions)
    check(undisturbed)
    for name in ("worker-0", "worker-1"):
        before = stack.child(name)["restarts"]

        async def kill(name: str = name) -> None:
            stack.signal(name, signal.SIGKILL)

        answers = await stack.client().ask_all(questions, midway=kill, after=STREAMS * 12)
        assert_same(answers, undisturbed)
        check(answers)
        stack.until_restarted(name, restarts=before + 1)


def test_refused_before_any_work(http: httpx.Client) -> None:
    body = {
        "model": "tiny_chat",
        "messages": [{"role": "user", "content": "hi"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}},
    }
    refused = http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (
        error["param"] == "response_format.json_schema.schema" and "not is not supported" in error["message"]
    )


class Dog(BaseModel):
    name: str
    age: int


def test_parse_of_the_openai_client(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="tiny_chat",
        messages=[{"role": "user", "content": "Invent a dog."}],
        response_format=Dog,
        n=2,
        seed=7,
        max_tokens=64,
        logprobs=True,
    )
    for choice in parsed.choices:
        assert isinstance(choice.message.parsed, Dog)
