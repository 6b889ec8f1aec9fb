"""Every kind of answer and every event of every stream, held against OpenAI's own description."""

import json
import re
from typing import Any

import httpx
import pytest

from tests.conformance.schemas import violations

pytestmark = pytest.mark.stack
ASK = [{"role": "user", "content": "Tell me a short story about a dog."}]
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}}
FORM = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY}}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several": {"n": 3, "seed": 4},
    "logprobs": {"logprobs": True, "top_logprobs": 4},
    "form": {"response_format": FORM, "max_tokens": 60},
    "any object": {"response_format": {"type": "json_object"}, "max_tokens": 60},
    "called": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 80},
    "named": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        "max_tokens": 80,
    },
    "may call": {"tools": [TOOL]},
    "after a call": {
        "tools": [TOOL],
        "messages": [
            *ASK,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ],
    },
    "stopped": {"stop": ["a", "e"]},
    "nothing": {"max_tokens": 0},
}
TEXTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several": {"prompt": ["Once", "Twice"], "n": 2},
    "logprobs": {"logprobs": 3},
    "echo": {"echo": True, "logprobs": 2, "max_tokens": 0},
    "form": {"guided_choice": ["yes", "no"]},
    "tokens": {"prompt": [5, 6, 7]},
}
UNFINISHED = re.compile(r"choices/\d+/finish_reason: None is not ")
"""In pieces before the last the reason is null, as in OpenAI's own streams; it describes whole ones only."""
RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "instructed": {"instructions": "Be brief.", "temperature": 0.5},
    "form": {"text": {"format": {"type": "json_schema", "name": "city", "strict": True, "schema": CITY}}},
    "called": {
        "tools": [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}],
        "tool_choice": "required",
    },
}


def whole(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = http.post(path, json={"model": "tiny_chat", **body})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of each event but `[DONE]`."""
    reply = http.post(path, json={"model": "tiny_chat", "stream": True, **body})
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("name", CHATS)
def test_chats(http: httpx.Client, name: str) -> None:
    body = {"messages": ASK, "max_tokens": 12, **CHATS[name]}
    assert violations("CreateChatCompletionResponse", whole(http, "/v1/chat/completions", body)) == []
    streamed = events(http, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    assert streamed[-1]["usage"]["total_tokens"] > 0
    for chunk in streamed:
        assert violations("CreateChatCompletionStreamResponse", chunk) == [], chunk


@pytest.mark.parametrize("name", TEXTS)
def test_completions(http: httpx.Client, name: str) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 8, **TEXTS[name]}
    reply = whole(http, "/v1/completions", body)
    if name == "echo":  # nothing precedes the first token: null, as OpenAI has it, though it does not say so
        logprobs = reply["choices"][0]["logprobs"]
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        logprobs["token_logprobs"][0], logprobs["top_logprobs"][0] = 0.0, {}
    assert violations("CreateCompletionResponse", reply) == []
    for chunk in events(http, "/v1/completions", body):
        found = violations("CreateCompletionResponse", chunk)
        if name == "echo" and chunk["choices"][0]["logprobs"]:
            continue
        assert [line for line in found if not UNFINISHED.match(line)] == [], chunk


@pytest.mark.parametrize("name", RESPONSES)
def test_responses(http: httpx.Client, name: str) -> None:
    body = {"input": "Tell me a short story.", "max_output_tokens": 80, **RESPONSES[name]}
    assert violations("Response", whole(http, "/v1/responses", body)) == []
    streamed = events(http, "/v1/responses", body)
    assert streamed[-1]["type"] in ("response.completed", "response.incomplete")
    assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))
    for event in streamed:
        assert violations("ResponseStreamEvent", event) == [], event


def test_models_and_refusals(http: httpx.Client) -> None:
    assert violations("ListModelsResponse", http.get("/v1/models").json()) == []
    assert violations("Model", http.get("/v1/models/tiny_chat").json()) == []
    refused = [
        http.get("/v1/models/none"),
        http.get("/v1/nothing"),
        http.get("/v1/chat/completions"),
        *(http.post(path, json={"model": "none"}) for path in ("/v1/embeddings", "/v1/responses")),
        http.post("/v1/completions", content=b"\xff"),
        http.post("/v1/chat/completions", json={"model": "tiny_chat", "messages": ASK, "n": 1000}),
    ]
    for reply in refused:
        assert 400 <= reply.status_code < 500 and violations("ErrorResponse", reply.json()) == [], reply.text
