"""A cheap load generator: concurrent streaming completions over HTTP/1.1, with the time of every event.

All sides of a comparison get their load from this client. It costs microseconds per token, so that it does
not limit a server on the same core. It knows only the two streaming endpoints of OpenAI's API.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import httptools
import orjson

from shared.errors import InternalError

_DONE = b"[DONE]"
_LOAD_DEADLINE_S = 240.0
_AGAIN_S = 0.05


@dataclass(frozen=True)
class Target:
    """A server on this machine."""

    port: int
    model: str
    key: str = ""
    path: str = "/v1/completions"
    host: str = "127.0.0.1"
    idempotency_key: str = ""
    """Sent as the Idempotency-Key header unless empty."""


@dataclass
class Answer:
    """Answer to one request. Times are `time.perf_counter()` seconds."""

    sent_s: float
    event_s: list[float] = field(default_factory=list)
    """Arrival of every event with text."""
    ended_s: float = 0.0
    completion_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens served from the prefix cache."""
    pieces: list[str] = field(default_factory=list)
    """Text of each event."""
    choices: list[int] = field(default_factory=list)
    """Choice of each event, out of `n`."""
    finish_reason: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def text_of(self, choice: int) -> str:
        """Return the text of one choice."""
        return "".join(piece for at, piece in zip(self.choices, self.pieces, strict=True) if at == choice)

    @property
    def first_s(self) -> float:
        """Time from sending to the first text. Raises IndexError if there is none."""
        return self.event_s[0] - self.sent_s


def full_answer(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """Return the body of a greedy request for exactly `tokens` tokens."""
    return {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


async def complete(
    target: Target, body: dict[str, Any], deadline_s: float, into: Answer | None = None
) -> Answer:
    """Run one streaming request on its own connection and return its answer. Failures set `error` and
    raise nothing. `into` is filled as events arrive."""
    request = {"model": target.model, "stream": True, "stream_options": {"include_usage": True}, **body}
    answer = into or Answer(time.perf_counter())
    exchange = _Exchange(answer, asyncio.get_running_loop().create_future())
    transport: asyncio.BaseTransport | None = None
    try:
        async with asyncio.timeout(deadline_s):
            transport, _ = await asyncio.get_running_loop().create_connection(
                lambda: exchange, target.host, target.port
            )
            answer.sent_s = time.perf_counter()
            exchange.send(_head_and_body(target, orjson.dumps(request)))
            await exchange.over
    except TimeoutError:
        answer.error = f"no end within {deadline_s:g} s"
    except OSError as error:
        answer.error = f"connection: {error}"
    finally:
        if transport is not None:
            transport.close()
    answer.ended_s = time.perf_counter()
    return answer


async def insist(target: Target, body: dict[str, Any], key: str, deadline_s: float) -> Answer:
    """Like `complete`, with an idempotency key: retry until complete if the connection breaks or the
    answer moved. `event_s` has only events with new text."""
    began_s, held_chars, event_s = time.perf_counter(), Counter[int](), list[float]()
    while True:
        left_s = began_s + deadline_s - time.perf_counter()
        answer = await complete(replace(target, idempotency_key=key), body, max(0.0, left_s))
        chars = Counter[int]()
        for at_s, piece, choice in zip(answer.event_s, answer.pieces, answer.choices, strict=True):
            chars[choice] += len(piece)
            if chars[choice] > held_chars[choice]:
                held_chars[choice] = chars[choice]
                event_s.append(at_s)
        if not _is_asked_again(answer.error) or left_s <= 0:
            return replace(answer, sent_s=began_s, event_s=event_s)
        await asyncio.sleep(_AGAIN_S)


def _is_asked_again(error: str) -> bool:
    """Whether a client with an idempotency key retries: the connection broke, or the answer has moved."""
    codes = ("answer_moved", "shutting_down")
    return error.startswith(("connection", "status 503")) or any(code in error for code in codes)


async def complete_all(target: Target, bodies: Sequence[dict[str, Any]], deadline_s: float) -> list[Answer]:
    """Run all requests at once; return answers in the order of `bodies`."""
    return list(await asyncio.gather(*(complete(target, body, deadline_s) for body in bodies)))


def run_batch(target: Target, bodies: Sequence[dict[str, Any]], deadline_s: float) -> list[Answer]:
    """Run `complete_all` in a new event loop."""
    import uvloop

    return uvloop.run(complete_all(target, bodies, deadline_s))


async def get(target: Target, path: str, deadline_s: float) -> int:
    """Return the status of a GET. Raises OSError or TimeoutError if there is none."""
    async with asyncio.timeout(deadline_s):
        reader, writer = await asyncio.open_connection(target.host, target.port)
        try:
            writer.write(
                f"GET {path} HTTP/1.1\r\nHost: {target.host}\r\n{_authorization(target)}"
                "Connection: close\r\n\r\n".encode()
            )
            return int((await reader.readline()).split()[1])
        except (IndexError, ValueError) as error:
            raise OSError("not an HTTP answer") from error
        finally:
            writer.close()


def answers(target: Target, path: str = "/health") -> bool:
    """Whether a GET of `path` succeeds now."""
    try:
        return asyncio.run(get(target, path, 2.0)) == 200
    except (OSError, TimeoutError):
        return False


def check(answers_: Sequence[Answer], tokens: int) -> int:
    """Return the number of answers that failed or do not have `tokens` tokens."""
    return sum(not one.ok or one.completion_tokens != tokens for one in answers_)


def first_error(answers_: Sequence[Answer]) -> str:
    """Return the error of the first failed answer, or ""."""
    return next((one.error for one in answers_ if one.error), "")


def _authorization(target: Target) -> str:
    return f"Authorization: Bearer {target.key}\r\n" if target.key else ""


def _head_and_body(target: Target, body: bytes) -> bytes:
    key = f"Idempotency-Key: {target.idempotency_key}\r\n" if target.idempotency_key else ""
    head = (
        f"POST {target.path} HTTP/1.1\r\nHost: {target.host}:{target.port}\r\n{_authorization(target)}{key}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


class _Exchange(asyncio.Protocol):
    """One request and its stream, until `[DONE]`."""

    def __init__(self, answer: Answer, over: "asyncio.Future[None]") -> None:
        self.over = over
        self._answer = answer
        self._parser = httptools.HttpResponseParser(self)
        self._buffer = b""
        self._transport: asyncio.WriteTransport | None = None
        self._now_s = 0.0

    def send(self, data: bytes) -> None:
        if self._transport is None:
            raise InternalError("not connected")
        self._transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # of a stream connection

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"connection lost: {error or 'closed before the end'}")

    def on_body(self, body: bytes) -> None:
        """Called by httptools with each piece of the de-chunked body."""
        self._buffer += body
        if self._parser.get_status_code() != 200:
            return
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._on_event(line[5:].strip())

    def on_message_complete(self) -> None:
        """Called by httptools at the end of the body."""
        status = self._parser.get_status_code()
        text = self._buffer.decode("utf-8", "replace")[:300]
        self._end(f"status {status}: {text}" if status != 200 else "the stream ended without [DONE]")

    def _on_event(self, data: bytes) -> None:
        if data == _DONE:
            self._end("")
            return
        event = orjson.loads(data)
        if "error" in event:
            self._end(str(event["error"]))
            return
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            if text:
                self._answer.event_s.append(self._now_s)
                self._answer.pieces.append(text)
                self._answer.choices.append(choice.get("index", 0))
            self._answer.finish_reason = choice["finish_reason"] or self._answer.finish_reason
        if usage := event.get("usage"):
            self._answer.completion_tokens = usage["completion_tokens"]
            self._answer.prompt_tokens = usage["prompt_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            self._answer.cached_tokens = details.get("cached_tokens") or 0

    def _end(self, error: str) -> None:
        if not self.over.done():
            self._answer.error = error
            self.over.set_result(None)


@dataclass(frozen=True)
class LoadResult:
    """Answers and duration of one load."""

    answers: Sequence[Answer]
    elapsed_s: float
    began_s: float = 0.0
    """`time.perf_counter()` at its start."""

    @property
    def failures(self) -> int:
        return sum(not answer.ok for answer in self.answers)

    @property
    def requests_per_s(self) -> float:
        return len(self.answers) / self.elapsed_s

    @property
    def tokens_per_s(self) -> float:
        """Prompt and answer tokens per second."""
        return sum(one.prompt_tokens + one.completion_tokens for one in self.answers) / self.elapsed_s

    @property
    def cached_share(self) -> float:
        """Share of all prompt tokens served from the cache, from usage."""
        prompts = sum(answer.prompt_tokens for answer in self.answers)
        return sum(answer.cached_tokens for answer in self.answers) / prompts if prompts else 0.0


async def serve_all(
    target: Target,
    bodies: Sequence[dict[str, Any]],
    at_once: int,
    *,
    due_s: Sequence[float] = (),
    until_s: float = inf,
) -> LoadResult:
    """Run requests in order with at most `at_once` in flight.

    `due_s` are the earliest send times in seconds from the start; by default none. Requests not finished
    `until_s` seconds after the start have failed. Raises ValueError if the lengths of `due_s` and `bodies`
    differ.
    """
    slots = asyncio.Semaphore(at_once)
    began_s = time.perf_counter()

    async def one(body: dict[str, Any], after_s: float) -> Answer:
        await asyncio.sleep(began_s + after_s - time.perf_counter())
        async with slots:
            left_s = began_s + until_s - time.perf_counter()
            return await complete(target, body, max(0.0, min(_LOAD_DEADLINE_S, left_s)))

    pairs = list(zip(bodies, due_s or [0.0] * len(bodies), strict=True))
    answers = await asyncio.gather(*(one(*pair) for pair in pairs))
    return LoadResult(answers, time.perf_counter() - began_s, began_s)
