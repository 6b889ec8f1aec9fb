"""The response to one completion request, streamed or whole. It watches the connection from the start, so
that a disconnect frees the blocks at once. An error before the headers is a plain HTTP error; after them, an
error event. An idle event stream sends comments."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, cast

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.database import committed
from services.gateway.errors import ClientGone, free_frames
from services.gateway.exchange import NO_LEGACY, Deadline, Exchange, Legacy, admitted
from services.gateway.http.connection import DIRECT_WRITER, DirectWriter
from services.gateway.http.middleware import RequestRecord
from services.gateway.openai.admission import Acceptance, AdmittedRequest
from services.gateway.openai.replies import (
    NO_DETAILS,
    AnswerWriter,
    FinishedChoice,
    Letterhead,
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
from shared.errors import KvasirError, UnavailableError
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
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})

    async def write(self, events: bytes, *, is_last: bool = False) -> None:
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

    def push(self, read: Callable[[], bytes]) -> bool:
        """Write what `read` returns, at once; False, without a call, before the headers are sent and while
        the client does not keep up."""
        writer = self._writer
        if writer is None or not self.has_begun or self._is_writing or not writer.is_open:
            return False
        if events := read():
            writer.write(events)
            self._wrote_s = self._loop.time()
        return True

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


def salt_of(tenant: str, cache_salt: str, adapter: str = "") -> bytes:
    """Return the prefix-cache salt: `tenant` is the key's digest, `cache_salt` the request's field."""
    digest = blake2b(digest_size=SALT_BYTES)
    for part in (tenant, cache_salt, adapter) if adapter else (tenant, cache_salt):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(4, "little"))
        digest.update(encoded)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Lasting:
    """Parameters of an answer that can be read again at any gateway; its pieces depend only on tokens."""

    request_id: str
    legacy: Legacy
    on_open: Callable[[Exchange], None]
    before_first: Awaitable[None]


@dataclass(frozen=True, slots=True)
class Reading:
    """A request that was read and admitted."""

    model: Acceptance
    job: AdmittedRequest
    writer: AnswerWriter
    answer_id: str
    created: int


class CompletionResponse(Response):
    """ASGI response to an admitted job; runs it when called."""

    def __init__(
        self,
        sessions: Sessions,
        reading: Reading,
        record: RequestRecord,
        deadline: Deadline,
        lasting: Lasting | None = None,
    ) -> None:
        super().__init__()
        self._lasting = lasting
        self._sessions = sessions
        self._job, self._writer, self._model = reading.job, reading.writer, reading.model
        self.record = record
        self._deadline = deadline
        self._exchange: Exchange
        self._answers: list[ChoiceText] = []
        self._left = 0
        self._begun: set[int] = set()
        is_text = isinstance(self._writer, Letterhead) and self._job.reader is None
        self._text_writer = cast(Letterhead, self._writer) if is_text else None
        """Writer of answers that are not parsed."""
        self._has_details = self._job.rules.with_ids or self._job.continuous_usage
        self._readers: dict[int, PartReader] = {}
        """By choice; empty when answers are not parsed."""
        self._calling: set[int] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the job and send the answer. Raises KvasirError only before the headers are sent."""
        record, config, lasting, deadline = self.record, self._model.config, self._lasting, self._deadline
        model, adapter = config.served_name, self._model.adapter
        salt = salt_of(record.tenant, self._job.cache_salt, adapter)
        name = record.request_id if lasting is None else lasting.request_id
        legacy = NO_LEGACY if lasting is None else lasting.legacy
        exchange = self._exchange = self._sessions.open(
            self._job, name, deadline, salt, model, record.owner, legacy, adapter
        )
        if lasting is not None:
            lasting.on_open(exchange)
        answers = self._answers = self._sessions.answers(exchange, self._job, self._model.codec)
        self._left = len(answers)
        if self._job.reader is not None:
            self._readers = {answer.index: self._job.reader() for answer in answers}
        watcher = asyncio.create_task(_watch(receive, exchange), name="client watcher")
        timer = None
        if (remaining_s := deadline.remaining_s()) is not None:
            timer = asyncio.get_running_loop().call_later(remaining_s, exchange.fail, deadline.error())
        try:
            await admitted(exchange, config.admit_timeout_s)
            if lasting is not None:
                await lasting.before_first
            if self._job.stream:
                note = partial(self._sessions.note_blocked, record.request_id)
                await self._stream(EventStream(send, config.sse_keep_alive_s, scope.get(DIRECT_WRITER), note))
            else:
                await self._whole(send)
        except ClientGone as gone:
            record.is_gone = True
            free_frames(gone)
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
            record.note_answers(answers)

    async def _whole(self, send: Send) -> None:
        messages = [AnswerMessage() for _ in self._answers]
        tokens: list[list[PlacedToken]] = [[] for _ in self._answers]
        while True:
            for piece, answer in self._read():
                messages[answer.index].add(self._parts(piece, answer))
                tokens[answer.index].extend(piece.tokens)
            if not self._left:
                break
            await self._exchange.wait()
        choices = [
            FinishedChoice(
                answer.index,
                messages[answer.index],
                self._reason(answer) or "",
                self._logprobs(tokens[answer.index]),
                self._prompt_logprobs(answer),
                answer.matched_stop,
                answer.hidden,
                answer.ids if self._job.rules.with_ids else None,
            )
            for answer in self._answers
        ]
        body = self._writer.whole(choices, self._usage())
        if self._writer.stored is not None:
            await committed(self._writer.stored)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, out: EventStream) -> None:
        is_plain = self._text_writer is not None and not self._has_details and self._lasting is None
        is_plain = is_plain and len(self._answers) == 1 and self._answers[0].is_plain
        self._exchange.on_news = partial(self._push_text if is_plain else self._push, out)
        try:
            while True:
                if events := self._events():
                    await out.write(events)
                elif self._begun:
                    await out.begin()
                if not self._left:
                    break
                await out.wait(self._exchange)
            tail = self._writer.end(self._usage(), include_usage=self._job.include_usage)
            if self._writer.stored is not None:
                await committed(self._writer.stored)
        except KvasirError as error:
            if not out.has_begun:
                raise
            self.record.error = error
            tail = self._writer.failed(error)
        await out.write(tail, is_last=True)

    def _push(self, out: EventStream) -> bool:
        """Write new tokens without waking a task; False when a task must continue."""
        for answer in self._answers:
            if not answer.stream.is_open:
                return False
        return out.push(self._events) and self._left == len(self._answers)

    def _push_text(self, out: EventStream) -> bool:
        """Like `_push`, for one plain answer. After its first event, the next ones differ in text only."""
        if self._begun and self._answers[0].stream.is_open:
            return out.push(self._text_event)
        return self._push(out)

    def _text_event(self) -> bytes:
        text = self._answers[0].read_plain()
        return self._text_writer.text_event(0, text, None) if text and self._text_writer else b""

    def _events(self) -> bytes:
        events: list[bytes] = []
        for answer in self._answers:
            if answer.stream.tokens and answer.index not in self._begun:
                self._begun.add(answer.index)
                events.append(self._writer.begin(answer.index))
        for piece, answer in self._read():
            parts = [] if self._text_writer is not None else self._parts(piece, answer)
            reason, details = None, NO_DETAILS
            if piece.finish_reason is not None or piece.tokens or self._has_details:
                logprobs = self._logprobs(piece.tokens) if piece.tokens else None
                reason = None if piece.finish_reason is None else self._reason(answer)
                stop = answer.matched_stop if reason is not None else None
                ids = piece.ids if self._job.rules.with_ids else None
                details = PieceDetails(logprobs, stop, ids, answer.completion_tokens)
            if self._text_writer is not None:
                events.append(self._text_writer.text_event(answer.index, piece.text, reason, details))
            elif parts or reason is not None or details.logprobs is not None or piece.ids:
                events.append(self._writer.piece(answer.index, parts, reason, details))
        return b"".join(events)

    def _parts(self, piece: TextPiece, answer: ChoiceText) -> list[AnswerPart]:
        if not self._readers:
            return [Content(piece.text)] if piece.text else []
        reader = self._readers[answer.index]
        parts = reader.feed(piece.text) if piece.text else []
        if piece.finish_reason is not None:
            parts += reader.end(is_cut=answer.is_cut or piece.finish_reason is FinishReason.LENGTH)
        if any(isinstance(part, CallBegun) for part in parts):
            self._calling.add(answer.index)
        return parts

    def _reason(self, answer: ChoiceText) -> str | None:
        """Return why the answer ended; None if it has not."""
        reason = answer.finish_reason
        if reason is FinishReason.STOP and answer.index in self._calling:
            return "tool_calls"
        return None if reason is None else str(reason)

    def _read(self) -> list[tuple[TextPiece, ChoiceText]]:
        """Return new pieces; cancel the rest of a choice that a stop string ended. Pieces of a lasting answer
        are of one token each, so they do not depend on how tokens arrived."""
        pieces: list[tuple[TextPiece, ChoiceText]] = []
        for answer, sequence in zip(self._answers, self._exchange.sequences, strict=True):
            for piece in (answer.read(),) if self._lasting is None else answer.read_each():
                if piece is None:
                    continue
                pieces.append((piece, answer))
                if piece.finish_reason is not None:
                    self._left -= 1
                    if answer.is_cut:
                        self._sessions.finish(sequence, answer.completion_tokens)
        record = self.record
        if pieces and record.first_token_s is None and record.accepted_s is not None:
            record.first_token_s = monotonic_s() - record.accepted_s
        return pieces

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> dict[str, Any] | None:
        if (top := self._job.top_logprobs) is None:
            return None
        write = chat_logprobs if self._job.kind == "chat" else text_logprobs
        return write(tokens, self._model.vocabulary, top)

    def _prompt_logprobs(self, answer: ChoiceText) -> list[dict[str, Any] | None] | None:
        top = self._job.prompt_logprobs
        if top is None:
            return None
        prompt = self._job.whole_prompts[answer.index // self._job.n]
        return prompt_logprobs(prompt, answer.prompt_logprobs, self._model.vocabulary, top)

    def _usage(self) -> Usage:
        cached = completion = 0
        for answer in self._answers:
            completion += answer.completion_tokens
            if answer.index % self._job.n == 0:
                prompt = self._job.prompts[answer.index // self._job.n]
                cached += min(answer.stream.cached_tokens, len(prompt))
        return Usage(self._job.prompt_tokens, completion, cached)


async def _watch(receive: Receive, exchange: Exchange) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.fail(ClientGone())
