"""openai-python against the stack: answers, sampling fields, log-probabilities, held against the schemas."""

import math
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionTokenLogprob

from tests.conformance.schemas import violations
from tests.patience import PATIENCE_S, STACK_PATIENCE_S
from tests.stack.running import RunningStack

pytestmark = pytest.mark.stack
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me a short story about a dog."}]
MODEL = "tiny_chat"


def conforms(name: str, body: object) -> None:
    assert violations(name, body) == []


def test_chat_streamed_is_the_same_text(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 64, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    options: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    for chunk in chunks:
        conforms("CreateChatCompletionStreamResponse", chunk.model_dump(mode="json", exclude_unset=True))
    first, usage = chunks[0], chunks[-1]
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert usage.choices == [] and usage.usage == whole.usage
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason] == reasons[-1:]


def test_choices_differ_and_are_repeatable(client: OpenAI) -> None:
    def texts(seed: int) -> list[str | None]:
        reply = client.chat.completions.create(model=MODEL, messages=ASK, n=2, seed=seed, max_tokens=48)
        assert [choice.index for choice in reply.choices] == [0, 1]
        return [choice.message.content for choice in reply.choices]

    one, again, other = texts(7), texts(7), texts(8)
    assert one == again and one[0] != one[1] and one != other


def test_a_long_prompt_is_answered(client: OpenAI) -> None:
    prompt = "The old house stood silent beside the road. " * 150 + "Write one sentence about a house."
    reply = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": prompt}], max_tokens=64
    )
    assert reply.usage is not None and reply.usage.prompt_tokens >= 1200 and reply.choices[0].message.content


def test_logprobs_of_a_chat(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 24, "temperature": 0}
    asked |= {"logprobs": True, "top_logprobs": 5}
    raw = client.chat.completions.with_raw_response.create(**asked)
    conforms("CreateChatCompletionResponse", raw.http_response.json())
    reply = raw.parse()
    (choice,) = reply.choices
    assert choice.logprobs is not None and choice.logprobs.content
    assert joined(choice.logprobs.content) == choice.message.content
    for token in choice.logprobs.content:
        values = [top.logprob for top in token.top_logprobs]
        assert len(values) == 5 and values == sorted(values, reverse=True)
        assert sum(math.exp(value) for value in values) <= 1 + 1e-3
        assert token.logprob == values[0], "at temperature 0 the likeliest token is chosen"
        assert token.token == token.top_logprobs[0].token
    chunks = list(client.chat.completions.create(**asked, stream=True))
    streamed: list[ChatCompletionTokenLogprob] = []
    for chunk in chunks:
        conforms("CreateChatCompletionStreamResponse", chunk.model_dump(mode="json", exclude_unset=True))
        for part in chunk.choices:
            streamed += (part.logprobs and part.logprobs.content) or []
    assert [token.token for token in streamed] == [token.token for token in choice.logprobs.content]
    values = [token.logprob for token in choice.logprobs.content]
    assert [token.logprob for token in streamed] == pytest.approx(values, abs=1e-3)


def joined(tokens: Sequence[ChatCompletionTokenLogprob]) -> str:
    """The text whose bytes these tokens carry."""
    return bytes(byte for token in tokens for byte in token.bytes or ()).decode("utf-8", "replace")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_completion(client: OpenAI, stream: bool) -> None:
    create = client.completions.with_raw_response.create
    body: dict[str, Any] = {"model": MODEL, "prompt": "It was the best of times,", "temperature": 0}
    if stream:
        pieces = list(client.completions.create(**body, max_tokens=12, logprobs=2, stream=True))
        for piece in pieces:
            event = piece.model_dump(mode="json", exclude_unset=True)
            for choice in event["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"  # the schema has no events
            conforms("CreateCompletionResponse", event)
    else:
        raw = create(**body, max_tokens=12, logprobs=2)
        conforms("CreateCompletionResponse", raw.http_response.json())
        pieces = [raw.parse()]
    choices = [choice for piece in pieces for choice in piece.choices]
    text = "".join(choice.text for choice in choices)
    found = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens = [token for part in found for token in part.tokens or ()]
    offsets = [offset for part in found for offset in part.text_offset or ()]
    values = [value for part in found for value in part.token_logprobs or ()]
    tops = [top for part in found for top in part.top_logprobs or ()]
    assert len(tokens) == len(offsets) == len(values) == len(tops) > 0
    assert all(text[at:].startswith(token) for token, at in zip(tokens, offsets, strict=True))
    assert all(top[token] == value for top, token, value in zip(tops, tokens, values, strict=True))
    assert all(2 <= len(top) <= 3 for top in tops)


def test_penalties_change_the_answer_and_seeds_repeat_it(client: OpenAI) -> None:
    def text(**fields: Any) -> str:
        extra = {"ignore_eos": True, **fields.pop("extra_body", {})}
        reply = client.chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=64, temperature=0, extra_body=extra, **fields
        )
        return reply.choices[0].message.content or ""

    plain = text()
    for fields in (
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"extra_body": {"repetition_penalty": 1.5}},
    ):
        penalised = text(**fields)
        assert penalised != plain and text(**fields) == penalised


def test_min_tokens_and_stop_tokens(client: OpenAI, http: httpx.Client) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "temperature": 0}
    whole = client.chat.completions.create(**asked, max_tokens=16, logprobs=True)
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content is not None
    first = whole.choices[0].logprobs.content[0].token
    fields = {"prompt": first, "add_special_tokens": False}
    (token,) = http.post("/tokenize", json=fields).json()["tokens"]
    ended = client.chat.completions.create(**asked, max_tokens=16, extra_body={"stop_token_ids": [token]})
    assert ended.choices[0].message.content == "" and ended.choices[0].finish_reason == "stop"
    assert ended.usage is not None and ended.usage.completion_tokens == 1
    longer = client.chat.completions.create(
        **asked, max_tokens=16, extra_body={"stop_token_ids": [token], "min_tokens": 8}
    )
    assert longer.usage is not None and longer.usage.completion_tokens >= 8


def handovers(stack: RunningStack) -> float:
    """Attempts the gateway has given up for a higher one so far."""
    lines = httpx.get(f"{stack.operator_url}/metrics", timeout=STACK_PATIENCE_S).text.splitlines()
    return sum(float(li.split()[-1]) for li in lines if li.startswith("kvasir_gateway_handovers_total{"))


def told(client: OpenAI, index: int, received: list[int]) -> tuple[str, list[ChatCompletionTokenLogprob]]:
    """Text and tokens of a long answer; each chunk leaves a mark in `received`."""
    text, tokens = "", []
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": f"Tell me story number {index}."}],
        max_tokens=160,
        temperature=0.8 if index % 2 else 0,
        seed=index,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        logprobs=True,
        top_logprobs=2,
        stream=True,
        extra_body={"ignore_eos": True, "repetition_penalty": 1.1, "min_p": 0.02},
    ):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        tokens += (choice.logprobs and choice.logprobs.content) or []
        received.append(index)
    return text, tokens


def test_penalties_and_logprobs_outlive_a_worker(client: OpenAI, stack: RunningStack) -> None:
    """Four streams on two workers, of which one that runs any of them is killed while all of them run."""
    received: list[int] = []
    ask = partial(told, client, received=received)
    with ThreadPoolExecutor(4) as threads:
        undisturbed = list(threads.map(ask, range(4)))
        for victim in ("worker-0", "worker-1", "worker-0", "worker-1"):
            before, handed_over = stack.child(victim)["restarts"], handovers(stack)
            received.clear()
            give_up_s = time.monotonic() + PATIENCE_S
            answers = [threads.submit(ask, index) for index in range(4)]
            while len(received) < 80:
                assert time.monotonic() < give_up_s
                time.sleep(0.002)
            stack.signal(victim, signal.SIGKILL)
            resumed = [answer.result(timeout=60) for answer in answers]
            stack.until_restarted(victim, restarts=before + 1)
            if handovers(stack) > handed_over:
                break
    assert handovers(stack) > handed_over, "no stream ran on a worker that was killed"
    assert [text for text, _ in resumed] == [text for text, _ in undisturbed]
    for (_, tokens), (_, true_tokens) in zip(resumed, undisturbed, strict=True):
        assert [token.token for token in tokens] == [token.token for token in true_tokens]
        values = [token.logprob for token in true_tokens]
        assert [token.logprob for token in tokens] == pytest.approx(values, abs=1e-2)
