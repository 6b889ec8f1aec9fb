"""litellm: two streamed turns, usage, and our errors as its own exception types."""

import asyncio
from typing import Any

import litellm
import pytest

from tests.clients.chats import FIRST, MAX_TOKENS, OVERLONG, SECOND, UNKNOWN_MODEL, WRONG_KEY
from tests.clients.serving import Serving

Messages = list[dict[str, str]]
litellm.suppress_debug_info = True


def complete(stack: Serving, messages: Messages, **fields: Any) -> Any:
    model = fields.pop("model", stack.model)
    return litellm.completion(
        model=f"openai/{model}",
        messages=messages,
        **{"api_base": stack.base_url, "api_key": stack.key, "max_tokens": MAX_TOKENS, "num_retries": 0}
        | fields,
    )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_two_streamed_turns(stack: Serving) -> None:
    messages: Messages = []
    for text in (FIRST, SECOND):
        messages.append(user(text))
        stream = complete(stack, messages, temperature=0, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        parts = [choice.delta.content for choice in choices if choice.delta.content]
        answer = "".join(parts)
        assert len(parts) > 1 and answer.strip()
        assert [choice.finish_reason for choice in choices if choice.finish_reason] in (["stop"], ["length"])
        assert chunks[-1].usage.completion_tokens > 1
        messages.append({"role": "assistant", "content": answer})


def test_the_chunks_add_up_to_the_whole_answer(stack: Serving) -> None:
    whole = complete(stack, [user(FIRST)], temperature=0)
    chunks = list(complete(stack, [user(FIRST)], temperature=0, stream=True))
    built = litellm.stream_chunk_builder(chunks)
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert built.choices[0].finish_reason == whole.choices[0].finish_reason


async def count_parts(stack: Serving) -> int:
    stream = await litellm.acompletion(
        model=f"openai/{stack.model}",
        messages=[user(FIRST)],
        api_base=stack.base_url,
        api_key=stack.key,
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
    )
    return len([chunk async for chunk in stream if chunk.choices[0].delta.content])


def test_its_asynchronous_client_streams_several_at_once(stack: Serving) -> None:
    async def ask_all() -> list[int]:
        return await asyncio.gather(*(count_parts(stack) for _ in range(4)))

    assert all(parts > 1 for parts in asyncio.run(ask_all()))


@pytest.mark.parametrize("stream", [False, True])
def test_an_overlong_prompt(stack: Serving, stream: bool) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        complete(stack, [user(OVERLONG)], stream=stream)


def test_an_unknown_model(stack: Serving) -> None:
    with pytest.raises(litellm.NotFoundError, match=UNKNOWN_MODEL):
        complete(stack, [user(FIRST)], model=UNKNOWN_MODEL)


def test_a_wrong_key(stack: Serving) -> None:
    with pytest.raises(litellm.AuthenticationError):
        complete(stack, [user(FIRST)], api_key=WRONG_KEY)


def test_a_field_out_of_range(stack: Serving) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        complete(stack, [user(FIRST)], temperature=-1)
