"""Structured answers and tool calls on a whole stack: valid, streamed or not, the same under kills."""

import json
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionToolParam
from pydantic import BaseModel

from tests.conformance.schemas import closed
from tests.stack.client import Answer, Question, assert_same
from tests.stack.running import RunningStack
from tests.stack.test_openai import conforms

pytestmark = pytest.mark.stack
STREAMS = 16
_PARTS = {"type": "array", "items": {"type": "string"}}
SCHEMA = closed(title={"type": "string"}, year={"type": "integer"}, parts=_PARTS)
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
        answers = await stack.ask_and_kill(questions, STREAMS * 12, name)
        assert_same(answers, undisturbed)
        check(answers)


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


CITY = closed(city={"type": "string"}, unit={"enum": ["C", "F"]})
TOOLS: list[ChatCompletionToolParam] = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


def check_call(name: str, arguments: str) -> None:
    schemas = {"weather": CITY, "now": {"type": "object", "maxProperties": 0}}
    jsonschema.validate(json.loads(arguments), schemas[name])


def test_required_calls_are_valid_and_may_be_answered(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="tiny_chat", messages=ASK, tools=TOOLS, tool_choice="required", max_tokens=200, seed=1, n=3
    )
    conforms("CreateChatCompletionResponse", reply.model_dump(mode="json", exclude_unset=True))
    for choice in reply.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
        for call in choice.message.tool_calls:
            assert call.type == "function"
            check_call(call.function.name, call.function.arguments)
    message = reply.choices[0].message
    results: list[Any] = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls or ()
    ]
    history: list[Any] = [*ASK, message.model_dump(), *results]
    after = client.chat.completions.create(
        model="tiny_chat", messages=history, tools=TOOLS, max_tokens=8, temperature=0
    )
    assert after.choices[0].message.content


def test_the_stream_says_the_same(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "tiny_chat",
        "messages": ASK,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "max_tokens": 80,
        "seed": 5,
    }
    whole = client.chat.completions.create(**fields).choices[0]
    pieces: list[Any] = []
    reason = None
    for chunk in client.chat.completions.create(**fields, stream=True):
        conforms("CreateChatCompletionStreamResponse", chunk.model_dump(mode="json", exclude_unset=True))
        pieces += chunk.choices[0].delta.tool_calls or []
        reason = chunk.choices[0].finish_reason or reason
    assert reason == whole.finish_reason == "tool_calls" and whole.message.tool_calls
    (call,) = whole.message.tool_calls
    assert call.type == "function"
    assert pieces[0].function is not None and pieces[0].function.name == call.function.name == "weather"
    assert pieces[0].id and all(piece.index == 0 for piece in pieces)
    streamed = "".join(piece.function.arguments or "" for piece in pieces if piece.function)
    assert streamed == call.function.arguments
    check_call("weather", streamed)
