"""The response to one completion request, streamed or whole.

It watches the connection from the start, so that a disconnect frees the blocks at once. An error before the
headers is a plain HTTP error; after them, an error event. An idle event stream sends comments.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.errors import ClientGone
from services.gateway.exchange import NO_LEGACY, Deadline, Exchange, Legacy, admitted
from services.gateway.http.connection import DIRECT_WRITER, DirectWriter
from services.gateway.http.middleware import RequestRecord
from services.gateway.models import ServedModel
from services.gateway.openai.admission import AdmittedRequest
from services.gateway.openai.replies import (
    AnswerWriter,
    FinishedChoice,
    PieceDetails,
    Usage,
    chat_logprobs,
    prompt_logprobs,
    text_logprobs,
)
from services.gateway.parts.items import AnswerMessage, AnswerPart, CallBegun, Content, PartReader
from services.gateway.sessions import Sessions
from services.gateway.text.choice_text import ChoiceText, PlacedToken, TextPiece
from shared.clock import monotonic_s
from shared.errors import InternalError, KvasirError, UnavailableError
from shared.messages.sequence import FinishReason

KEEP_ALIVE = b": keep-alive\n\n"
"""An SSE comment: parsers skip it, and proxies see a live connection."""
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


BLOCKED_S = 0.005
"""Seconds above which a write counts as blocked by the reader."""


class EventStream:
    """An SSE response. The headers go out with the first write, or after `keep_alive_s`."""

    def __init__(
        self,
        send: Send,
        keep_alive_s: float,
        writer: DirectWriter | None = None,
        on_blocked: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`on_blocked` receives the seconds that a write waited for the reader."""
        self._on_blocked = on_blocked
        self._send = send
        self._writer = writer
        self._is_writing = False
        self._keep_alive_s = keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._wrote_s = self._loop.time()
        self.has_begun = False
        """The headers are sent; later errors are events."""

    async def begin(self) -> None:
        """Send the headers, once."""
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})

    async def write(self, events: bytes, *, is_last: bool = False) -> None:
        """Send events, after the headers."""
        self._is_writing = True
        began_s = self._loop.time()
        try:
            await self.begin()
            await self._send({"type": "http.response.body", "body": events, "more_body": not is_last})
        finally:
            self._is_writing = False
            self._wrote_s = self._loop.time()
            if self._wrote_s - began_s > BLOCKED_S:
                self._on_blocked(self._wrote_s - began_s)

    @property
    def can_push(self) -> bool:
        """Whether `push` may be called: the headers are sent, and the client keeps up."""
        writer = self._writer
        return writer is not None and self.has_begun and not self._is_writing and writer.is_open

    def push(self, events: bytes) -> None:
        """Send events without waiting."""
        if self._writer is None:
            raise InternalError("there is no way to push events")
        self._writer.write(events)
        self._wrote_s = self._loop.time()

    async def wait(self, exchange: Exchange) -> None:
        """Wait for a change of the exchange, sending keep-alive comments. Raises as `Exchange.wait` does."""
        while True:
            try:
                async with asyncio.timeout_at(self._wrote_s + self._keep_alive_s):
                    return await exchange.wait()
            except TimeoutError:
                if self._loop.time() >= self._wrote_s + self._keep_alive_s:
                    await self.write(KEEP_ALIVE)


SALT_BYTES = 16


def salt_of(tenant: str, cache_salt: str) -> bytes:
    """Return the prefix-cache salt: `tenant` is the key's digest, `cache_salt` the request's field."""
    digest = blake2b(digest_size=SALT_BYTES)
    for part in (tenant, cache_salt):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(4, "little"))
        digest.update(encoded)
    return digest.digest()


JSON_HEADERS = [(b"content-type", b"application/json")]


@dataclass(frozen=True, slots=True)
class Lasting:
    """Parameters of an answer that can be read again at any gateway; its pieces depend only on tokens."""

    request_id: str
    """Id of its sequences."""
    legacy: Legacy
    on_open: Callable[[Exchange], None]
    """Called with the opened exchange."""
    before_first: Awaitable[None]
    """Awaited before the first write."""


class CompletionResponse(Response):
    """ASGI response to an admitted job; runs it when called."""

    def __init__(
        self,
        sessions: Sessions,
        job: AdmittedRequest,
        writer: AnswerWriter,
        record: RequestRecord,
        deadline: Deadline,
        served: ServedModel,
        lasting: Lasting | None = None,
    ) -> None:
        super().__init__()
        self._lasting = lasting
        self._sessions = sessions
        self._job = job
        self._writer = writer
        self._record = record
        self._deadline = deadline
        self._served = served
        self._config = served.config
        self._readers: dict[int, PartReader] = {}
        """By choice; empty when answers are not parsed."""
        self._calling: set[int] = set()
        """Choices that call a function."""

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the answer after its headers were sent."""
        return self._record.error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the job and send the answer. Raises KvasirError only before the headers are sent."""
        salt = salt_of(self._record.tenant, self._job.cache_salt)
        exchange = self._sessions.open(
            self._job,
            self._record.request_id if self._lasting is None else self._lasting.request_id,
            self._deadline,
            salt,
            self._served.name,
            self._record.owner,
            NO_LEGACY if self._lasting is None else self._lasting.legacy,
        )
        if self._lasting is not None:
            self._lasting.on_open(exchange)
        answers = self._sessions.answers(exchange, self._job, self._served.acceptance.codec)
        if self._job.reader is not None:
            self._readers = {answer.index: self._job.reader() for answer in answers}
        watcher = asyncio.create_task(_watch(receive, exchange), name="client watcher")
        remaining_s = self._deadline.remaining_s()
        loop = asyncio.get_running_loop()
        timer = (
            None
            if remaining_s is None
            else loop.call_later(remaining_s, exchange.fail, self._deadline.error())
        )
        try:
            await admitted(exchange, self._config.admit_timeout_s)
            if self._lasting is not None:
                await self._lasting.before_first
            if self._job.stream:
                note = partial(self._sessions.note_blocked, self._record.request_id)
                out = EventStream(send, self._config.sse_keep_alive_s, scope.get(DIRECT_WRITER), note)
                await self._stream(exchange, answers, out)
            else:
                await self._whole(exchange, answers, send)
        except ClientGone:
            self._record.is_gone = True
        except KvasirError as error:
            if not isinstance(error, UnavailableError):
                self._writer.failed(error)  # a background response is read later
            raise
        finally:
            exchange.on_news = None
            watcher.cancel()
            if timer is not None:
                timer.cancel()
            self._sessions.close(exchange)
            self._record.note_answers(answers)

    async def _whole(self, exchange: Exchange, answers: list[ChoiceText], send: Send) -> None:
        messages = [AnswerMessage() for _ in answers]
        tokens: list[list[PlacedToken]] = [[] for _ in answers]
        while True:
            for piece, answer in self._read(exchange, answers):
                messages[answer.index].add(self._parts(piece, answer))
                tokens[answer.index].extend(piece.tokens)
            if not _pending(answers):
                break
            await exchange.wait()
        choices = [
            FinishedChoice(
                answer.index,
                messages[answer.index],
                self._reason(answer.finish_reason, answer) or "",
                self._logprobs(tokens[answer.index]),
                self._prompt_logprobs(answer),
                answer.matched_stop,
                answer.hidden,
                answer.ids if self._job.rules.with_ids else None,
            )
            for answer in answers
        ]
        body = self._writer.whole(choices, self._usage(answers))
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [*JSON_HEADERS, length]})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, exchange: Exchange, answers: list[ChoiceText], out: EventStream) -> None:
        begun: set[int] = set()
        exchange.on_news = lambda: self._push(exchange, answers, out, begun)
        try:
            while True:
                if events := self._events(exchange, answers, begun):
                    await out.write(events)
                elif any(answer.stream.tokens for answer in answers):
                    await out.begin()
                if not _pending(answers):
                    break
                await out.wait(exchange)
            tail = self._writer.end(self._usage(answers), include_usage=self._job.include_usage)
        except KvasirError as error:
            if not out.has_begun:
                raise
            self._record.error = error
            tail = self._writer.failed(error)
        await out.write(tail, is_last=True)

    def _push(self, exchange: Exchange, answers: list[ChoiceText], out: EventStream, begun: set[int]) -> bool:
        """Write new tokens without waking a task; False when a task must continue."""
        if not out.can_push or not all(answer.stream.is_open for answer in answers):
            return False
        if events := self._events(exchange, answers, begun):
            out.push(events)
        return all(answer.finish_reason is None for answer in answers)

    def _events(self, exchange: Exchange, answers: list[ChoiceText], begun: set[int]) -> bytes:
        events: list[bytes] = []
        for answer in answers:
            if answer.stream.tokens and answer.index not in begun:
                begun.add(answer.index)
                events.append(self._writer.begin(answer.index))
        for piece, answer in self._read(exchange, answers):
            logprobs = self._logprobs(piece.tokens) if piece.tokens else None
            parts = self._parts(piece, answer)
            reason = self._reason(piece.finish_reason, answer)
            if parts or reason is not None or logprobs is not None or piece.ids:
                stop = answer.matched_stop if reason is not None else None
                ids = piece.ids if self._job.rules.with_ids else None
                details = PieceDetails(logprobs, stop, ids, answer.completion_tokens)
                events.append(self._writer.piece(answer.index, parts, reason, details))
        return b"".join(events)

    def _parts(self, piece: TextPiece, answer: ChoiceText) -> list[AnswerPart]:
        """Return the parts of a piece of text."""
        reader = self._readers.get(answer.index)
        if reader is None:
            return [Content(piece.text)] if piece.text else []
        parts = reader.feed(piece.text) if piece.text else []
        if piece.finish_reason is not None:
            parts += reader.end(is_cut=answer.is_cut or piece.finish_reason is FinishReason.LENGTH)
        if any(isinstance(part, CallBegun) for part in parts):
            self._calling.add(answer.index)
        return parts

    def _reason(self, reason: FinishReason | None, answer: ChoiceText) -> str | None:
        if reason is FinishReason.STOP and answer.index in self._calling:
            return "tool_calls"
        return None if reason is None else str(reason)

    def _read(self, exchange: Exchange, answers: list[ChoiceText]) -> list[tuple[TextPiece, ChoiceText]]:
        """Return new pieces; cancel the rest of a choice that a stop string ended."""
        pieces: list[tuple[TextPiece, ChoiceText]] = []
        for answer, sequence in zip(answers, exchange.sequences, strict=True):
            for piece in self._new_pieces(answer):
                pieces.append((piece, answer))
                if piece.finish_reason is not None and answer.is_cut:
                    self._sessions.finish(sequence, answer.completion_tokens)
        if pieces and self._record.first_token_s is None and self._record.accepted_s is not None:
            self._record.first_token_s = monotonic_s() - self._record.accepted_s
        return pieces

    def _new_pieces(self, answer: ChoiceText) -> Iterable[TextPiece]:
        if self._lasting is not None:
            return answer.read_each()
        piece = answer.read()
        return () if piece is None else (piece,)

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> dict[str, Any] | None:
        """Return log-probabilities in the API's format; None if not requested."""
        if (top := self._job.top_logprobs) is None:
            return None
        write = chat_logprobs if self._job.kind == "chat" else text_logprobs
        return write(tokens, self._served.vocabulary, top)

    def _prompt_logprobs(self, answer: ChoiceText) -> list[dict[str, Any] | None] | None:
        top = self._job.prompt_logprobs
        if top is None:
            return None
        prompt = self._job.given[answer.index // self._job.n].prompt
        return prompt_logprobs(prompt, answer.echo.logprobs, self._served.vocabulary, top)

    def _usage(self, answers: list[ChoiceText]) -> Usage:
        firsts = answers[:: self._job.n]
        cached = sum(
            min(answer.stream.cached_tokens, len(prompt))
            for answer, prompt in zip(firsts, self._job.prompts, strict=True)
        )
        return Usage(self._job.prompt_tokens, sum(answer.completion_tokens for answer in answers), cached)


def _pending(answers: list[ChoiceText]) -> bool:
    return any(answer.finish_reason is None for answer in answers)


async def _watch(receive: Receive, exchange: Exchange) -> None:
    """Wait for the client to disconnect, ignoring other messages."""
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.leave()
