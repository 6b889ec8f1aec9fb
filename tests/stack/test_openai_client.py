"""openai-python against the stack; every body is held against OpenAI's own schemas."""

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.conformance.schemas import violations

pytestmark = pytest.mark.stack
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me a short story about a dog."}]
MODEL = "tiny_chat"


def conforms(name: str, body: object) -> None:
    assert violations(name, body) == []


def test_chat(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=ASK, max_tokens=64)
    conforms("CreateChatCompletionResponse", raw.http_response.json())
    reply = raw.parse()
    assert reply.choices[0].message.content
    assert reply.choices[0].finish_reason in ("stop", "length")
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert 0 < reply.usage.completion_tokens <= 64


def test_chat_streamed_is_the_same_text(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=64, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=ASK,
            max_tokens=64,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    for chunk in chunks:
        conforms("CreateChatCompletionStreamResponse", chunk.model_dump(mode="json", exclude_unset=True))
    first, usage = chunks[0], chunks[-1]
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert usage.choices == []
    assert usage.usage == whole.usage
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason] == reasons[-1:]


def test_completions(client: OpenAI) -> None:
    prompt = "It was the best of times,"
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt=prompt, max_tokens=24, temperature=0
    )
    conforms("CreateCompletionResponse", raw.http_response.json())
    whole = raw.parse().choices[0].text
    chunks = list(
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=24, temperature=0, stream=True)
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole != ""


def test_choices_differ_and_are_repeatable(client: OpenAI) -> None:
    def texts(seed: int) -> list[str | None]:
        reply = client.chat.completions.create(
            model=MODEL, messages=ASK, n=2, seed=seed, temperature=1.0, max_tokens=48
        )
        assert [choice.index for choice in reply.choices] == [0, 1]
        return [choice.message.content for choice in reply.choices]

    one, again, other = texts(7), texts(7), texts(8)
    assert one == again
    assert one[0] != one[1]
    assert one != other


def test_stop_is_cut_and_not_shown(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=64)
    text = whole.choices[0].message.content or ""
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=64, stop=[stop])
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_a_long_prompt_is_answered(client: OpenAI) -> None:
    prompt = "The old house stood silent beside the road. " * 150 + "Write one sentence about a house."
    reply = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": prompt}], max_tokens=64
    )
    assert reply.usage is not None and reply.usage.prompt_tokens >= 1200
    assert reply.choices[0].message.content


@pytest.mark.parametrize(
    ("error", "param", "fields"),
    [
        (openai.NotFoundError, "model", {"model": "gpt-5"}),
        (openai.BadRequestError, "temperature", {"temperature": -1}),
        (openai.BadRequestError, "messages", {"messages": [{"role": "user", "content": "word " * 6000}]}),
    ],
)
def test_errors(
    client: OpenAI, error: type[openai.APIStatusError], param: str, fields: dict[str, object]
) -> None:
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": ASK, **fields})  # type: ignore[call-overload]
    body = caught.value.response.json()
    conforms("ErrorResponse", body)
    assert body["error"]["param"] == param
