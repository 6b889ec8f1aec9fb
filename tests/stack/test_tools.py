"""Tool calls on a whole stack through OpenAI's own client, held to their parameters, streamed and not."""

import json
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionToolParam

from tests.stack.test_openai_client import conforms

pytestmark = pytest.mark.stack
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: list[ChatCompletionToolParam] = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


def check(name: str, arguments: str) -> None:
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
            check(call.function.name, call.function.arguments)
    message = reply.choices[0].message
    results: list[Any] = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls or ()
    ]
    history: list[Any] = [*ASK, message.model_dump(), *results]
    after = client.chat.completions.create(model="tiny_chat", messages=history, tools=TOOLS, max_tokens=8)
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
    check("weather", streamed)


def test_the_clients_own_helper_for_streams(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny_chat", messages=ASK, tools=TOOLS, tool_choice="required", max_tokens=120, seed=9
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls


def test_a_model_that_may_call_may_also_talk(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="tiny_chat", messages=ASK, tools=TOOLS, max_tokens=8, temperature=0
    )
    assert reply.choices[0].message.content and reply.choices[0].finish_reason == "length"
