"""Anthropic's own SDK: whole, streamed, tools, counted, and its errors."""

from typing import Any

import anthropic
import pytest

from tests.clients.serving import Serving

ASK: list[Any] = [{"role": "user", "content": "Tell me a short story about a dog."}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def client_of(stack: Serving, **fields: Any) -> anthropic.Anthropic:
    named = fields or {"api_key": stack.key}
    return anthropic.Anthropic(base_url=stack.base_url.removesuffix("/v1"), max_retries=0, **named)


def test_whole_and_streamed(stack: Serving) -> None:
    client = client_of(stack)
    fields: dict[str, Any] = {"model": stack.model, "max_tokens": 30, "messages": ASK}
    fields["extra_body"] = {"temperature": 0}
    whole = client.messages.create(**fields)
    assert whole.content[0].type == "text" and whole.content[0].text
    with client.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().stop_reason == whole.stop_reason
    assert client.messages.count_tokens(model=stack.model, messages=ASK).input_tokens > 5
    bearer = client_of(stack, auth_token=stack.key, api_key=None)
    assert bearer.messages.create(**fields).content


def test_tools(stack: Serving) -> None:
    client = client_of(stack)
    tools: list[Any] = [{"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}]
    fields: dict[str, Any] = {"model": stack.model, "max_tokens": 200, "tools": tools}
    called = client.messages.create(**fields, messages=ASK, tool_choice={"type": "any"})
    uses = [block for block in called.content if block.type == "tool_use"]
    assert uses and called.stop_reason == "tool_use" and set(uses[0].input) == {"city"}
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"} for use in uses]
    history = [*ASK, {"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
    assert client.messages.create(**fields, messages=history).content


def test_errors(stack: Serving) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client_of(stack).messages.create(model="no_such_model", max_tokens=5, messages=ASK)
    with pytest.raises(anthropic.AuthenticationError):
        client_of(stack, api_key="wrong").messages.create(model=stack.model, max_tokens=5, messages=ASK)
