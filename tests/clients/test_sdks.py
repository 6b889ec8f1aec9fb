"""SDKs: Anthropic's own, embeddings, and structured helpers against a model that knows nothing."""

from typing import Any

import anthropic
import instructor
import litellm
import openai
import pytest
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

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


TEXTS = ["A dog ran home.", "Rain fell on the roof.", "A dog ran home again."]


def test_openai_and_litellm_and_langchain_agree(stack: Serving) -> None:
    client = openai.OpenAI(base_url=stack.base_url, api_key=stack.key, max_retries=0)
    found = client.embeddings.create(model=stack.model, input=TEXTS)
    own = [each.embedding for each in found.data]
    theirs = litellm.embedding(
        f"openai/{stack.model}", input=TEXTS, api_base=stack.base_url, api_key=stack.key, max_retries=0
    )
    chained = OpenAIEmbeddings(
        model=stack.model, base_url=stack.base_url, api_key=stack.key, check_embedding_ctx_length=False
    ).embed_documents(TEXTS)
    for one, two, three in zip(own, [each["embedding"] for each in theirs.data], chained, strict=True):
        assert max(abs(a - b) + abs(a - c) for a, b, c in zip(one, two, three, strict=True)) < 1e-3


def test_what_is_alike_is_near(stack: Serving) -> None:
    client = openai.OpenAI(base_url=stack.base_url, api_key=stack.key, max_retries=0)
    first, rain, again = (e.embedding for e in client.embeddings.create(model=stack.model, input=TEXTS).data)
    assert abs(sum(a * a for a in first) - 1.0) < 1e-5

    def nearness(one: list[float], other: list[float]) -> float:
        return sum(a * b for a, b in zip(one, other, strict=True))

    assert nearness(first, again) > nearness(first, rain)


INVENT = "Invent a dog."
MAX_TOKENS = 200


class Dog(BaseModel):
    name: str
    age: int


def openai_of(stack: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.base_url, api_key=stack.key, max_retries=0)


def test_openai_parse_and_stream(stack: Serving) -> None:
    client = openai_of(stack)
    messages: list[Any] = [{"role": "user", "content": INVENT}]
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
    client = openai_of(stack)
    fields: dict[str, Any] = {"model": stack.model, "input": INVENT, "max_output_tokens": MAX_TOKENS}
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
        found = model.with_structured_output(None, method=method).invoke(INVENT)
        assert isinstance(found, dict)
        return
    assert isinstance(model.with_structured_output(Dog, method=method).invoke(INVENT), Dog)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_instructor(stack: Serving, mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai_of(stack), mode=mode)
    dog = client.chat.completions.create(
        model=stack.model,
        messages=[{"role": "user", "content": INVENT}],
        response_model=Dog,
        max_tokens=MAX_TOKENS,
        max_retries=0,
    )
    assert isinstance(dog, Dog)
