"""Answers through a real port, whole and as events: cut at stop strings, kept alive in silence, given up when
the client leaves, and nothing after an error but itself."""

import asyncio
import gc
import json
import weakref
from collections.abc import Iterator

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from services.gateway.config import GatewayConfig
from services.gateway.errors import ClientGone
from services.gateway.exchange import Exchange
from services.gateway.http.completion_response import KEEP_ALIVE, SALT_BYTES, EventStream, salt_of
from services.gateway.http.connection import DIRECT_WRITER, ENGAGE, DirectWriter, bind, make_server
from shared.messages.sequence import FinishReason, unpack_tokens
from tests.patience import until
from tests.services.gateway.conftest import ANSWER, MakeStack, Stack, encode_chat
from tests.services.gateway.fakes import MODEL


def events_of(text: str) -> list[str]:
    """The data of each server-sent event."""
    assert text.endswith("\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


async def test_a_whole_chat_answer(stack: Stack) -> None:
    reply = await stack.chat(temperature=0)
    assert reply.status_code == 200
    body = reply.json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    assert body["model"] == MODEL
    message = {"role": "assistant", "content": ANSWER, "refusal": None}
    ended = {"logprobs": None, "finish_reason": "stop", "stop_reason": None}
    assert body["choices"] == [{"index": 0, "message": message, **ended}]
    tokens = len(stack.codec.tokenizer.encode(ANSWER, add_special_tokens=False).ids) + 1
    prompt = len(encode_chat(stack.codec, [{"role": "user", "content": "hello"}]))
    counts = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    assert body["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 3}}


async def test_a_streamed_chat_answer(stack: Stack) -> None:
    reply = await stack.chat(temperature=0, stream=True, stream_options={"include_usage": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events_of(reply.text)
    assert done == "[DONE]"
    bodies = [json.loads(chunk) for chunk in chunks]
    assert {body["object"] for body in bodies} == {"chat.completion.chunk"}
    assert bodies[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(body["choices"][0]["delta"].get("content", "") for body in bodies) == ANSWER
    reasons = [body["choices"][0]["finish_reason"] for body in bodies]
    assert reasons == [None] * (len(bodies) - 1) + ["stop"]
    final, counts = json.loads(usage), json.loads(usage)["usage"]
    assert final["choices"] == []
    assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
    assert all(body["usage"] is None for body in bodies)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_usage_in_every_chunk(stack: Stack, path: str) -> None:
    """`continuous_usage_stats` as vLLM has it: what has been computed by then."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = stack.body if "chat" in path else {"model": MODEL, "prompt": "hello"}
    body = {**body, "max_tokens": 8, "stream": True, "stream_options": options}
    reply = await stack.http.post(path, json=body)
    *chunks, last = [json.loads(chunk)["usage"] for chunk in events_of(reply.text)[:-1]]
    counts = [usage["completion_tokens"] for usage in chunks]
    assert counts == sorted(counts) and counts[-1] == last["completion_tokens"] == 8 > counts[0]
    assert {usage["prompt_tokens"] for usage in chunks} == {last["prompt_tokens"]}


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_and_what_ended_it(stack: Stack, stream: bool) -> None:
    """`return_token_ids` and `stop_reason` as vLLM has them: all ids, those that show nothing as well."""
    ids = stack.codec.encode_text(ANSWER, add_special_tokens=False)
    stop = ids[10]
    cases: list[tuple[dict[str, object], str | int | None, int | None]] = [
        ({"stop": ["END"]}, "END", None),
        ({"stop_token_ids": [stop]}, stop, ids.index(stop) + 1),
        ({"max_tokens": 3}, None, 3),
        ({}, None, len(ids) + 1),
    ]
    for fields, reason, count in cases:
        reply = await stack.chat(return_token_ids=True, stream=stream, **fields)
        bodies = [json.loads(e) for e in events_of(reply.text)[:-1]] if stream else [reply.json()]
        choices = [body["choices"][0] for body in bodies]
        found = [token for choice in choices for token in choice.get("token_ids", ())]
        assert found == [*ids, 2][: len(found)] and choices[-1]["stop_reason"] == reason
        assert count in (None, len(found))
        asked = [{"role": "user", "content": "hello"}]
        assert bodies[0]["prompt_token_ids"] == encode_chat(stack.codec, asked)
    prompts = {"model": MODEL, "prompt": ["hello", "you"], "return_token_ids": True, "max_tokens": 2}
    reply = await stack.http.post("/v1/completions", json={**prompts, "stream": stream})
    bodies = [json.loads(e) for e in events_of(reply.text)[:-1]] if stream else [reply.json()]
    choices = [choice for body in bodies for choice in body["choices"]]
    told = {choice["index"]: choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice}
    assert told == {at: stack.codec.encode_text(text) for at, text in enumerate(("hello", "you"))}


@pytest.mark.parametrize("min_tokens", [0, 1, 5])
async def test_stop_strings_wait_for_min_tokens(stack: Stack, min_tokens: int) -> None:
    """As in vLLM: a stop string that is complete within so many tokens does not end the answer."""
    reply = await stack.chat(stop=["The", "dog"], min_tokens=min_tokens)
    cut = "The" if min_tokens < len(stack.codec.encode_text("The", add_special_tokens=False)) else "dog"
    assert reply.json()["choices"][0]["message"]["content"] == ANSWER.partition(cut)[0]


PREFILL = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Well, the"}]


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        ("/v1/chat/completions", {"continue_final_message": True}, "<|assistant|>Well, the"),
        ("/v1/chat/completions", {"add_generation_prompt": False}, "<|assistant|>Well, the<|end|>\n"),
        ("/v1/chat/completions", {}, "<|assistant|>Well, the<|end|>\n<|assistant|>"),
        ("/v1/messages", {"max_tokens": 9}, "<|assistant|>Well, the"),
    ],
)
async def test_a_last_assistant_turn(
    stack: Stack, path: str, fields: dict[str, object], expected: str
) -> None:
    """Anthropic's API continues it (prefill), OpenAI's where that is asked for."""
    body = {"model": MODEL, "messages": PREFILL, "temperature": 0, **fields}
    reply = (await stack.http.post(path, json=body)).json()
    (spec,) = stack.scheduler.submits
    prompt = stack.codec.tokenizer.decode(unpack_tokens(spec.prompt), skip_special_tokens=False)
    assert prompt.endswith("hello<|end|>\n" + expected) or prompt.endswith("hello<|end|>" + expected)
    text = reply["content"][0]["text"] if "content" in reply else reply["choices"][0]["message"]["content"]
    assert text and ANSWER.startswith(text)
    if path == "/v1/messages":
        count = await stack.http.post("/v1/messages/count_tokens", json=body)
        assert count.json()["input_tokens"] == spec.prompt_tokens


async def test_what_cannot_be_continued(stack: Stack) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = [PREFILL[0], {"role": "assistant", "content": "x", "tool_calls": [call]}]
    both = await stack.chat(messages=PREFILL, continue_final_message=True, add_generation_prompt=True)
    calls = await stack.chat(messages=called, continue_final_message=True)
    assert (both.status_code, both.json()["error"]["param"]) == (400, "continue_final_message")
    assert (calls.status_code, calls.json()["error"]["param"]) == (400, "messages")
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
    body = {"model": MODEL, "max_tokens": 9, "messages": [PREFILL[0], used]}
    reply = await stack.http.post("/v1/messages", json=body)
    assert reply.status_code == 400 and "tool_result" in reply.json()["error"]["message"]


async def test_a_stop_string_cuts_the_text_and_cancels_the_rest(stack: Stack) -> None:
    reply = await stack.chat(temperature=0, stop=["lazy", "END of"])
    choice = reply.json()["choices"][0]
    assert choice["message"]["content"] == ANSWER.split("lazy")[0] and choice["finish_reason"] == "stop"
    await until(lambda: bool(stack.scheduler.cancelled and stack.scheduler.finished))
    await until(lambda: any(worker.cancelled for worker in stack.workers))
    assert stack.scheduler.finished[0].output_tokens == reply.json()["usage"]["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_sequence_at_once(stack: Stack, stream: bool) -> None:
    stack.pace(0.02)
    body = {**stack.body, "stream": stream, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=stack.url, headers=stack.http.headers) as client:
        request = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await until(lambda: any(held.tokens for worker in stack.workers for held in worker.held.values()))
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    await until(lambda: not any(worker.held for worker in stack.workers), within_s=5.0)
    await until(lambda: bool(stack.scheduler.cancelled), within_s=5.0)
    assert len(set(stack.scheduler.cancelled)) == 1, "said again only to a heartbeat that overtook it"
    await until(lambda: bool(stack.scheduler.finished), within_s=5.0)
    assert [event.finish_reason for event in stack.scheduler.finished] == [FinishReason.CANCELLED]


async def test_completions_take_texts_and_tokens(stack: Stack) -> None:
    one = await stack.openai.completions.create(model=MODEL, prompt="hello", max_tokens=200, temperature=0)
    assert one.choices[0].text == ANSWER and one.object == "text_completion"
    both = await stack.openai.completions.create(model=MODEL, prompt=["a", "b"], n=2, temperature=0)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[2].text != both.choices[1].text
    assert both.usage is not None and both.usage.completion_tokens == 4 * 16
    tokens = await stack.openai.completions.create(model=MODEL, prompt=[7, 8, 9], temperature=0)
    assert tokens.usage is not None and tokens.usage.prompt_tokens == 3
    stream = await stack.openai.completions.create(
        model=MODEL, prompt="x", max_tokens=200, temperature=0, stream=True
    )
    assert "".join([chunk.choices[0].text async for chunk in stream]) == ANSWER


def test_keys_and_salts_keep_apart() -> None:
    salts = [salt_of(tenant, salt) for tenant in ("", "a", "ab") for salt in ("", "b", "x")]
    assert len(set(salts)) == len(salts) and {len(salt) for salt in salts} == {SALT_BYTES}
    assert salt_of("a", "b") == salt_of("a", "b", "") != salt_of("a", "b", "x")
    assert salt_of("a", "\ud800") != salt_of("a", ""), "any text is one"


CHAT = "/v1/chat/completions"


class Sent(list[Message]):
    """Messages in the order sent."""

    async def __call__(self, message: Message) -> None:
        self.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self if message["type"] == "http.response.body"]


async def test_silence_is_filled_with_comments_and_begins_the_stream() -> None:
    sent, exchange = Sent(), Exchange()
    out = EventStream(sent, 0.03)
    began_s = asyncio.get_running_loop().time()
    waiting = asyncio.create_task(out.wait(exchange))
    await until(lambda: len(sent.bodies) >= 2)
    assert len(sent.bodies) <= (asyncio.get_running_loop().time() - began_s) / 0.03
    assert out.has_begun and not waiting.done() and set(sent.bodies) == {KEEP_ALIVE}
    exchange.changed.set()
    await waiting
    exchange.fail(ClientGone())
    with pytest.raises(ClientGone):
        await out.wait(exchange)


async def test_a_slow_stream_begins_and_is_kept_alive(make_stack: MakeStack) -> None:
    stack = await make_stack(sse_keep_alive_s=0.1)
    stack.hold()
    async with stack.http.stream("POST", CHAT, json={**stack.body, "stream": True}) as reply:
        assert reply.status_code == 200, "the headers are there before any token"
        lines = reply.aiter_lines()
        assert [await anext(lines) for _ in range(4)] == [": keep-alive", ""] * 2
        stack.hold(is_held=False)
        rest = [line async for line in lines]
    chunks = [json.loads(line[6:]) for line in rest if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == ANSWER
    assert rest[-2:] == ["data: [DONE]", ""]


async def test_once_it_has_begun_errors_are_events(make_stack: MakeStack) -> None:
    stack = await make_stack(sse_keep_alive_s=0.05, request_timeout_s=0.4)
    stack.hold()
    reply = await stack.chat(stream=True)
    assert reply.status_code == 200
    *comments, last, done = reply.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]" and set(comments) == {": keep-alive"}
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What is in a reference cycle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_what_a_failed_request_held_is_freed_at_once(make_stack: MakeStack, uncollected: None) -> None:
    stack = await make_stack(request_timeout_s=0.2)
    stack.hold()
    assert (await stack.chat()).status_code == 504
    await until(lambda: all(type(each).__name__ != "CompletionResponse" for each in gc.get_objects()))


REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
BIG = bytes(1024 * 1024)


class Application:
    """Begins and ends as ASGI has it; what is between goes through the lane."""

    def __init__(self) -> None:
        self.opened: list[bool] = []
        self.paused = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        lane: DirectWriter = scope[DIRECT_WRITER]
        self.connection = weakref.ref(scope[ENGAGE].args[0])
        self.opened.append(lane.is_open)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.opened.append(lane.is_open)
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        lane.write(b"bc")
        lane.write(b"d" * 20)
        if scope["path"] == "/big":
            while lane.is_open:
                lane.write(BIG)
            self.paused.set()
        await send({"type": "http.response.body", "body": b"e"})
        self.opened.append(lane.is_open)


async def served(path: bytes, *, reads_at_once: bool) -> tuple[bytes, Application]:
    application, config = Application(), GatewayConfig.model_validate({"port": 0, "shutdown_grace_s": 0})
    listener = bind(config.host, config.port, "port")
    server = make_server(application, config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
    writer.write(REQUEST.replace(b" / ", b" " + path + b" "))
    if not reads_at_once:
        await asyncio.wait_for(application.paused.wait(), 10)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    server.should_exit = True
    await asyncio.wait_for(serving, 10)
    listener.close()
    return answer, application


async def test_pieces_are_chunks_between_those_of_asgi(uncollected: None) -> None:
    answer, application = await served(b"/", reads_at_once=True)
    assert application.connection() is None, "freed at once"
    _, _, body = answer.partition(b"\r\n\r\n")
    assert body == b"1\r\na\r\n2\r\nbc\r\n14\r\n" + b"d" * 20 + b"\r\n1\r\ne\r\n0\r\n\r\n"
    assert application.opened == [False, True, False], "open between the headers and the end"


async def test_a_reader_that_does_not_keep_up_closes_the_lane() -> None:
    answer, application = await served(b"/big", reads_at_once=False)
    assert application.paused.is_set() and len(answer) > len(BIG) and answer.endswith(b"1\r\ne\r\n0\r\n\r\n")


async def test_news_that_shows_nothing_does_not_put_the_comment_off() -> None:
    sent, exchange = Sent(), Exchange()
    out = EventStream(sent, 0.05)
    for _ in range(12):
        asyncio.get_running_loop().call_later(0.01, exchange.changed.set)
        await out.wait(exchange)
    assert KEEP_ALIVE in sent.bodies
