"""OpenAI's Responses API and Anthropic's Messages API on a whole stack: one answer in every shape."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.conformance.schemas import closed
from tests.patience import STACK_PATIENCE_S
from tests.stack.running import RunningStack

pytestmark = pytest.mark.stack
ASK = "Tell me a short story about a dog."
CITY = closed(city={"type": "string"})


@pytest.fixture(scope="module")
def anthropic(stack: RunningStack) -> Iterator[httpx.Client]:
    headers = {"x-api-key": stack.key, "anthropic-version": "2023-06-01"}
    with httpx.Client(base_url=stack.url, headers=headers, timeout=STACK_PATIENCE_S) as client:
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> str:
    asked = [{"role": "user", "content": ASK}]
    fields = {"max_tokens": 20, "temperature": 0, **fields}
    body: dict[str, Any] = {"model": "tiny_chat", "messages": asked, **fields}
    return str(client.chat.completions.create(**body).choices[0].message.content)


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and data of each event."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_a_response_is_the_chats_answer(client: openai.OpenAI) -> None:
    reply = client.responses.create(model="tiny_chat", input=ASK, max_output_tokens=20, temperature=0)
    assert reply.output_text == chat(client)
    assert (reply.status, reply.usage and reply.usage.output_tokens) == ("incomplete", 20)
    assert reply.incomplete_details and reply.incomplete_details.reason == "max_output_tokens"
    told = client.responses.create(
        model="tiny_chat",
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": ASK}]},
            {"role": "assistant", "content": "A dog ran."},
            {"role": "user", "content": "Thanks!"},
        ],
        max_output_tokens=300,
    )
    assert told.status == "completed" and told.output_text


def test_calls_of_responses(client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}]
    called = client.responses.create(
        model="tiny_chat", input=ASK, tools=tools, tool_choice="required", max_output_tokens=80
    )
    calls = [item for item in called.output if item.type == "function_call"]
    assert calls and all("city" in json.loads(call.arguments) for call in calls)
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
    history: list[Any] = [{"role": "user", "content": ASK}, *(call.model_dump() for call in calls), *results]
    after = client.responses.create(model="tiny_chat", input=history, tools=tools, max_output_tokens=8)
    assert after.output_text


def test_functions_of_a_namespace_are_named_apart(client: openai.OpenAI, stack: RunningStack) -> None:
    """As Codex sends and expects them: a call has the namespace in a field of its own."""
    run = {"type": "function", "name": "run", "parameters": CITY}
    spaces = [{"type": "namespace", "name": name, "tools": [run]} for name in ("multi_agent_v1", "mcp__a__")]
    body: dict[str, Any] = {"model": "tiny_chat", "input": ASK, "tools": [run, *spaces]}
    body["max_output_tokens"] = 80
    headers = {"Authorization": f"Bearer {stack.key}"}
    for space in ("multi_agent_v1", "mcp__a__"):
        body["tool_choice"] = {"type": "function", "namespace": space, "name": "run"}
        whole = httpx.post(f"{stack.url}/v1/responses", json=body, headers=headers, timeout=60).json()
        (call,) = [item for item in whole["output"] if item["type"] == "function_call"]
        assert (call["namespace"], call["name"]) == (space, "run")
        assert list(json.loads(call["arguments"])) == ["city"]
        streamed = httpx.post(
            f"{stack.url}/v1/responses", json={**body, "stream": True}, headers=headers, timeout=60
        )
        done = [data for name, data in events_of(streamed.text) if name == "response.output_item.done"]
        assert (done[-1]["item"]["namespace"], done[-1]["item"]["name"]) == (space, "run")
    plain = {**body, "tool_choice": {"type": "function", "name": "run"}}
    whole = httpx.post(f"{stack.url}/v1/responses", json=plain, headers=headers, timeout=60).json()
    assert [item.get("namespace") for item in whole["output"]] == [None]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    history: list[Any] = [{"role": "user", "content": ASK}, call, result]
    after = client.responses.create(
        model="tiny_chat", input=history, tools=body["tools"], max_output_tokens=8
    )
    assert after.output_text


class Dog(BaseModel):
    name: str
    age: int


def test_the_clients_own_helpers_for_responses(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model="tiny_chat", input="A dog?", text_format=Dog, max_output_tokens=60)
    assert isinstance(parsed.output_parsed, Dog)
    with client.responses.stream(
        model="tiny_chat", input=ASK, max_output_tokens=400, temperature=0
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == chat(client, max_tokens=400)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"text": {"format": {"type": "jsonschema"}}}, "text.format.type"),
        ({"max_output_tokens": 10**6}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ],
)
def test_what_responses_have_not(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/responses", body={"model": "tiny_chat", "input": "hi", **fields}, cast_to=object)
    assert caught.value.param == param


def message(anthropic: httpx.Client, **fields: Any) -> httpx.Response:
    asked = [{"role": "user", "content": ASK}]
    body = {"model": "tiny_chat", "messages": asked, "max_tokens": 20, "temperature": 0, **fields}
    return anthropic.post("/v1/messages", json=body)


def test_a_message_is_the_chats_answer(client: openai.OpenAI, anthropic: httpx.Client) -> None:
    found = message(anthropic).json()
    assert found["content"] == [{"type": "text", "text": chat(client)}]
    assert (found["type"], found["role"], found["stop_reason"]) == ("message", "assistant", "max_tokens")
    counted = anthropic.post(
        "/v1/messages/count_tokens",
        json={"model": "tiny_chat", "messages": [{"role": "user", "content": ASK}]},
    ).json()["input_tokens"]
    usage = found["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert usage["output_tokens"] == 20
    word = chat(client).split()[3]
    stopped = message(anthropic, stop_sequences=[*"ABCDEF", word]).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", word)
    briefed = [{"type": "text", "text": "Be brief."}]
    assert message(anthropic, system=briefed, max_tokens=300).json()["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 10**6}, r"input length and `max_tokens` exceed context limit: \d+ \+ 1000000 > \d+"),
        ({"system": "word " * 30_000}, r"prompt is too long: \d+ tokens > \d+ maximum"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, r"tools\[0\]\.name should be 1 to 256 letters"),
        ({"tools": [{"name": "a", "input_schema": {}}, {"name": "a"}]}, "two tools have one name"),
    ],
)
def test_errors_in_anthropics_words(anthropic: httpx.Client, fields: dict[str, Any], words: str) -> None:
    """Claude Code reads the first two: it asks again with fewer tokens, or compacts the chat."""
    assert re.search(words, message(anthropic, **fields).json()["error"]["message"])


def test_events_of_a_message(client: openai.OpenAI, anthropic: httpx.Client) -> None:
    events = events_of(message(anthropic, stream=True).text)
    names = [name for name, _ in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    assert text == chat(client)
    delta = events[-2][1]
    assert delta["delta"]["stop_reason"] == "max_tokens" and delta["usage"]["output_tokens"] == 20


def test_tools_of_messages(anthropic: httpx.Client) -> None:
    tools = [{"name": "weather", "description": "Of a city.", "input_schema": CITY}]
    choice = {"type": "tool", "name": "weather"}
    fields: dict[str, Any] = {"tools": tools, "tool_choice": choice, "max_tokens": 60}
    called = message(anthropic, **fields).json()
    (block,) = called["content"]
    assert (called["stop_reason"], block["type"], list(block["input"])) == ("tool_use", "tool_use", ["city"])
    events = events_of(message(anthropic, **fields, stream=True).text)
    written = "".join(data["delta"]["partial_json"] for name, data in events if name == "content_block_delta")
    assert json.loads(written) == block["input"]
    content = [{"type": "text", "text": "sunny"}]
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": content}
    history = [
        {"role": "user", "content": ASK},
        {"role": "assistant", "content": called["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    after = message(anthropic, messages=history, tools=tools, max_tokens=8)
    assert after.status_code == 200 and after.json()["content"][0]["text"]


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"model": "other"}, 404, "not_found_error"),
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error"),
        ({"stop_sequences": ["x"] * 33}, 400, "invalid_request_error"),
    ],
)
def test_errors_of_messages(anthropic: httpx.Client, fields: dict[str, Any], status: int, kind: str) -> None:
    reply = message(anthropic, **fields)
    assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)
    assert next(iter(fields)) in reply.json()["error"]["message"]
    listed = anthropic.get("/v1/models").json()  # with x-api-key alone; Codex looks for `models`
    assert (listed["data"][0]["id"], listed["models"]) == ("tiny_chat", [])
    stranger = anthropic.post("/v1/messages", json={}, headers={"x-api-key": "no"})
    assert (stranger.status_code, stranger.json()["error"]["type"]) == (401, "authentication_error")
