"""Bodies as OpenAI's schema has them, with nothing optional in them that is null. Log-probabilities in
OpenAI's two shapes; never an infinity."""

import asyncio
import json
import math
from typing import Any

import httpx
import orjson
import pytest

from services.gateway.anthropic import MessageWriter, parse_messages
from services.gateway.openai.fields import Ignored
from services.gateway.openai.replies import (
    LOWEST,
    FinishedChoice,
    Letterhead,
    PieceDetails,
    ReplyKind,
    Usage,
    chat_logprobs,
    text_logprobs,
)
from services.gateway.parts.items import AnswerMessage, ToolCallItem
from services.gateway.text.choice_text import PlacedToken
from services.gateway.text.tokenizer import Codec, Vocabulary
from shared.errors import InvalidRequest
from shared.messages.tokens import TokenLogprobs
from tests.conformance.schemas import violations
from tests.patience import until
from tests.services.gateway.conftest import ANSWER, Stack
from tests.services.gateway.fakes import MODEL


def event(data: bytes) -> Any:
    assert data.startswith(b"data: ") and data.endswith(b"\n\n") and data.count(b"\n") == 2
    return json.loads(data.removeprefix(b"data: "))


def test_a_plain_piece_has_the_bytes_of_a_general_one() -> None:
    for kind, model in (("chat", 'a "" b'), ("text", 'm","text":""')):
        head = Letterhead("chat" if kind == "chat" else "text", "id-1", 5, model)
        for index, text in ((0, "x"), (3, 'quote " and \\ and \n'), (0, '""'), (3, "é😀\u2028")):
            if kind == "chat":
                choice: dict[str, Any] = {"index": index, "delta": {"content": text}, "finish_reason": None}
            else:
                choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
            assert head.text_event(index, text, None) == head._event([choice])


@pytest.fixture
def vocabulary(codec: Codec) -> Vocabulary:
    return Vocabulary(codec.tokenizer)


def placed(codec: Codec) -> list[PlacedToken]:
    a, b, c = codec.tokenizer.encode("abc", add_special_tokens=False).ids
    return [
        PlacedToken(a, TokenLogprobs(-0.5, ((a, -0.5), (b, -1.0), (c, -math.inf))), 0),
        PlacedToken(c, TokenLogprobs(-math.inf, ((b, -0.25), (a, math.nan))), 1),
    ]


@pytest.mark.parametrize(("kind", "name"), [("chat", "CreateChatCompletion"), ("text", "CreateCompletion")])
def test_both_conform(codec: Codec, vocabulary: Vocabulary, kind: ReplyKind, name: str) -> None:
    write = chat_logprobs if kind == "chat" else text_logprobs
    letterhead = Letterhead(kind, "id-1", 1_700_000_000, "m")
    for tokens in (placed(codec), []):
        found: dict[str, Any] = write(tokens, vocabulary, 2)
        finished = [FinishedChoice(0, AnswerMessage("ac"), "stop", found)]
        whole = json.loads(letterhead.whole(finished, Usage(1, 2, 0)))
        assert violations(f"{name}Response", whole) == []
        assert whole["choices"][0]["logprobs"] == json.loads(orjson.dumps(found))
        piece = event(letterhead.text_event(0, "ac", "stop", PieceDetails(found)))
        stream = "CreateChatCompletionStreamResponse" if kind == "chat" else "CreateCompletionResponse"
        assert violations(stream, piece) == []


def events_of(reply: httpx.Response) -> list[Any]:
    """The choices of each event."""
    lines = [line for line in reply.text.splitlines() if line.startswith("data: {")]
    return [choice for line in lines for choice in json.loads(line[6:])["choices"]]


@pytest.mark.parametrize("stop", [None, ["lazy cat", "END off"]])
async def test_a_streamed_chat_lists_what_the_whole_one_does(stack: Stack, stop: list[str] | None) -> None:
    asked = {"logprobs": True, "top_logprobs": 3, "stop": stop}
    whole = (await stack.chat(**asked)).json()
    assert violations("CreateChatCompletionResponse", whole) == []
    content = whole["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == ANSWER
    assert [entry["logprob"] for entry in content] == [-at / 1000 for at in range(len(content))]
    assert [len(entry["top_logprobs"]) for entry in content] == [3] * len(content)
    assert {entry["top_logprobs"][2]["logprob"] for entry in content} == {LOWEST}
    assert whole["usage"]["completion_tokens"] == len(content) + 1, "the end token is not shown"
    streamed = []
    for choice in events_of(await stack.chat(stream=True, **asked)):
        listed = (choice.get("logprobs") or {"content": []})["content"]
        assert choice["delta"].get("content") or not listed
        streamed += listed
    assert streamed == content


async def test_a_streamed_completion_lists_what_the_whole_one_does(stack: Stack) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 200, "temperature": 0, "logprobs": 2}
    whole = (await stack.http.post("/v1/completions", json=body)).json()
    assert violations("CreateCompletionResponse", whole) == []
    listed = whole["choices"][0]["logprobs"]
    offsets = listed["text_offset"]
    assert offsets == sorted(offsets) and offsets[-1] < len(ANSWER)
    assert all(len(top) == 2 for top in listed["top_logprobs"])
    merged: dict[str, list[Any]] = {name: [] for name in listed}
    for choice in events_of(await stack.http.post("/v1/completions", json={**body, "stream": True})):
        for name, values in (choice["logprobs"] or {}).items():
            merged[name] += values
    assert merged == listed


async def test_a_resumed_answer_keeps_those_it_had(stack: Stack) -> None:
    undisturbed = (await stack.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]
    await until(lambda: not any(worker.held for worker in stack.workers))
    stack.pace(0.05)  # it is not over before its worker is lost
    request = asyncio.create_task(stack.chat(logprobs=True, top_logprobs=2))
    await until(lambda: any(len(h.tokens) >= 5 for w in stack.workers for h in w.held.values()))
    first = next(worker for worker in stack.workers if worker.held)
    first.frozen = True
    await stack.scheduler.lose(first)
    assert (await request).json()["choices"][0] == undisturbed
    last = stack.scheduler.submits[-1]
    assert last.ref.attempt == 2 and last.generated_tokens > 0 and last.sampling.top_logprobs == 2


async def test_a_stop_token_is_not_shown(stack: Stack) -> None:
    token = stack.codec.tokenizer.encode(ANSWER, add_special_tokens=False).ids[7]
    reply = (await stack.chat(stop_token_ids=[token], ignore_eos=True, logprobs=True)).json()
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "stop" and ANSWER.startswith(choice["message"]["content"])
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == choice["message"]["content"]
    assert reply["usage"]["completion_tokens"] == len(choice["logprobs"]["content"]) + 1


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"id": 1234567890123456789012345}', '{"id": 1234567890123456789012345}'),
        ('{"x": [1.10, 1e400, -0]}', '{"x": [1.10, 1e400, -0]}'),
        ("[9007199254740993]", '{"arguments":[9007199254740993]}'),
        ('{"x": NaN}', '{"arguments":"{\\"x\\": NaN}"}'),
        ("", "{}"),
    ],
)
def test_numbers_in_arguments_keep_their_digits(arguments: str, written: str) -> None:
    """Keeps an id beyond 64 bits from being a server error, and any other from becoming a double."""
    message = AnswerMessage(calls=[ToolCallItem("f", arguments)])
    whole = MessageWriter("msg_1", "m", 1).whole([FinishedChoice(0, message, "stop")], Usage(1, 1, 0))
    assert f'"input":{written}'.encode() in whole
    json.loads(whole)


@pytest.mark.parametrize("number", [-(2**63) - 1, 2**64, 1234567890123456789012345])
def test_numbers_in_the_history_keep_their_digits(number: int) -> None:
    """Keeps an id beyond 64 bits, sent back in `tool_use`, from becoming a double."""
    used = {"type": "tool_use", "id": "c", "name": "f", "input": {"id": [number, 0.5]}}
    messages = [{"role": "assistant", "content": [used]}, {"role": "user", "content": "x"}]
    body = json.dumps({"model": "m", "max_tokens": 9, "messages": messages})
    chat = parse_messages(body.encode(), 10, Ignored())
    called = chat["messages"][0]["tool_calls"][0]["function"]
    assert called["arguments"] == json.dumps(used["input"])
    deep = body.replace(str(number), f"{'[' * 1000}{number}{']' * 1000}")
    with pytest.raises(InvalidRequest, match="nested too deeply") as caught:
        parse_messages(deep.encode(), 10, Ignored())
    assert caught.value.param == "messages"
