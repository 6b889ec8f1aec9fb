"""Clients' structured helpers against a model that knows nothing: what they get is valid all the same."""

from typing import Any

import instructor
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.clients.serving import Serving

ASK = "Invent a dog."
MAX_TOKENS = 200


class Dog(BaseModel):
    name: str
    age: int


def client_of(stack: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.base_url, api_key=stack.key, max_retries=0)


def test_openai_parse_and_stream(stack: Serving) -> None:
    client = client_of(stack)
    messages: list[Any] = [{"role": "user", "content": ASK}]
    fields: dict[str, Any] = {"model": stack.model, "messages": messages, "max_tokens": MAX_TOKENS}
    parsed = client.chat.completions.parse(**fields, response_format=Dog)
    assert isinstance(parsed.choices[0].message.parsed, Dog)
    with client.chat.completions.stream(**fields, response_format=Dog) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Dog)
    tool = openai.pydantic_function_tool(Dog)
    called = client.chat.completions.parse(**fields, tools=[tool], tool_choice="required")
    calls = called.choices[0].message.tool_calls
    assert calls and isinstance(calls[0].function.parsed_arguments, Dog)


def test_openai_responses(stack: Serving) -> None:
    client = client_of(stack)
    fields: dict[str, Any] = {"model": stack.model, "input": ASK, "max_output_tokens": MAX_TOKENS}
    assert isinstance(client.responses.parse(**fields, text_format=Dog).output_parsed, Dog)
    with client.responses.stream(**fields, text_format=Dog) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Dog)


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain(stack: Serving, method: Any) -> None:
    model = ChatOpenAI(
        model=stack.model, base_url=stack.base_url, api_key=stack.key, max_tokens=MAX_TOKENS, max_retries=0
    )
    if method == "json_mode":
        found = model.with_structured_output(None, method=method).invoke(ASK)
        assert isinstance(found, dict)
        return
    assert isinstance(model.with_structured_output(Dog, method=method).invoke(ASK), Dog)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_instructor(stack: Serving, mode: instructor.Mode) -> None:
    client = instructor.from_openai(client_of(stack), mode=mode)
    dog = client.chat.completions.create(
        model=stack.model,
        messages=[{"role": "user", "content": ASK}],
        response_model=Dog,
        max_tokens=MAX_TOKENS,
        max_retries=0,
    )
    assert isinstance(dog, Dog)
