"""From a request's body to its response: reads the body within limits, then admits it as its API has it. The
request may be another gateway's."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import msgspec
from fastapi import Request
from starlette.types import Receive

from services.gateway.anthropic import MessageWriter, parse_messages
from services.gateway.config import GatewayConfig
from services.gateway.errors import ClientGone, HttpError, shown, unknown_model
from services.gateway.exchange import Deadline
from services.gateway.http.completion_response import CompletionResponse, Lasting, Reading
from services.gateway.http.connection import MAX_DISCARDED_BYTES
from services.gateway.http.middleware import RequestRecord
from services.gateway.http.stored import ResponseStore
from services.gateway.openai.admission import Acceptance, AdmittedRequest, ContextLimit
from services.gateway.openai.embeddings import EmbeddingWriter, admit_embeddings
from services.gateway.openai.replies import AnswerWriter, Letterhead
from services.gateway.openai.responses import (
    ResponseRequest,
    ResponseWriter,
    chat_of,
    conversation_of,
    parse_response,
)
from services.gateway.parts.readers import PlainReader
from services.gateway.sessions import Sessions
from services.gateway.text.tokenizer import AT_ONCE_BYTES, TokenizerThreads
from shared.clock import monotonic_s, unix_s
from shared.errors import InvalidRequest
from shared.messages.sequence import unpack_tokens
from shared.messages.shadows import Shadow

_RAW, _GZIP_OR_ZLIB = -zlib.MAX_WBITS, zlib.MAX_WBITS | 32
_GZIP = b"\x1f\x8b"
"""Begins each member of a gzip body."""
_AT_ONCE = 4096
"""Bytes to inflate at once: the rest of them is copied at the end of each member."""
_ENCODINGS = {"": False, "identity": False, "gzip": True, "x-gzip": True, "deflate": True}
"""Supported encodings; True: the body is compressed."""


ReadBody = Callable[[Request], Awaitable[bytes]]
ROOM_BYTES = 256 * 1024 * 1024
"""For all bodies on their way, apart from those of at most `_SMALL_BYTES`."""
_SMALL_BYTES = 64 * 1024


class BodyReader:
    """Reads bodies of requests: each within its limits, and all on their way within `ROOM_BYTES`."""

    def __init__(
        self, config: GatewayConfig, threads: TokenizerThreads, room_bytes: int = ROOM_BYTES
    ) -> None:
        self._config = config
        self._threads = threads
        self._room_bytes = max(room_bytes, config.max_body_bytes)
        self._freed = asyncio.Event()

    async def read(self, request: Request) -> bytes:
        """Return the whole body. Raises HttpError 413 above the size limit (packed or unpacked), 408 past the
        deadline, 415 for an unknown encoding; 503 without room; InvalidRequest for a corrupt body, ClientGone
        on a disconnect."""
        encoding = request.headers.get("content-encoding", "").strip().lower()
        if encoding not in _ENCODINGS:
            text = f"a body with Content-Encoding {shown(encoding, 64)!r} is not read"
            advice = "send it as it is, or packed with gzip or deflate"
            raise HttpError(415, f"{text}: {advice}", error_code="unsupported_encoding", closes=True)
        most = self._config.max_body_bytes
        announced = request.headers.get("content-length", "")
        likely_bytes = int(announced) if announced.isdecimal() else most
        if likely_bytes > most:
            raise _too_large(most)
        if likely_bytes <= _SMALL_BYTES:
            body = await self._in_time(request)
        else:
            async with self._room(likely_bytes):
                body = await self._in_time(request)
        if not _ENCODINGS[encoding]:
            return body
        # The single reader thread bounds how many inflated bodies wait.
        return await self._threads.read(lambda: inflated(body, most), max(len(body), AT_ONCE_BYTES + 1))

    @asynccontextmanager
    async def _room(self, size_bytes: int) -> AsyncIterator[None]:
        """Hold that much of the room. Raises HttpError 503 when others have held it for too long."""
        timeout_s = self._config.receive_timeout_s / 2
        try:
            async with asyncio.timeout(timeout_s):
                while size_bytes > self._room_bytes:
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            text = "too many large request bodies are on their way: try again"
            raise HttpError(503, text, error_code="overloaded", closes=True) from None
        self._room_bytes -= size_bytes
        try:
            yield
        finally:
            self._room_bytes += size_bytes
            self._freed.set()

    async def _in_time(self, request: Request) -> bytes:
        timeout_s = self._config.receive_timeout_s
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await _collect(request.receive, self._config.max_body_bytes)
        # Not while TimeoutError is handled: its traceback would keep what came of the body.
        text = f"the request body did not arrive within {timeout_s:g} s"
        raise HttpError(408, text, error_code="request_timeout", closes=True)


def inflated(body: bytes, max_bytes: int) -> bytes:
    """Decompress gzip (of any number of members) or deflate (zlib or raw), up to `max_bytes`. Raises
    HttpError 413 for a longer result, InvalidRequest for truncated or other data."""
    content, at, bits = bytearray(), 0, _GZIP_OR_ZLIB
    while True:
        unpacking, begin = zlib.decompressobj(bits), at
        try:
            while not unpacking.eof and at < len(body):
                part = body[at : at + _AT_ONCE]
                content += unpacking.decompress(part, max_bytes + 1 - len(content))
                if len(content) > max_bytes:
                    raise _too_large(max_bytes, "inflated ", closes=False)
                at += len(part) - len(unpacking.unused_data)
        except zlib.error as error:
            if begin or bits == _RAW:
                raise InvalidRequest(f"the body cannot be inflated: {error}") from None
            at, bits = 0, _RAW
            content.clear()
            continue
        if not unpacking.eof:
            raise InvalidRequest("the packed body is cut off: it ends before its content does")
        if at == len(body):
            return bytes(content)
        if not body.startswith(_GZIP, at):
            raise InvalidRequest("the packed body has more after its end: pack it as one piece")


async def _collect(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    received_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        received_bytes += len(part)
        if received_bytes <= max_bytes:
            body += part
        is_last = not message.get("more_body", False)
        if received_bytes > max_bytes and (is_last or received_bytes > max_bytes + MAX_DISCARDED_BYTES):
            raise _too_large(max_bytes)
        if is_last:
            return bytes(body)


def _too_large(max_bytes: int, how: str = "", *, closes: bool = True) -> HttpError:
    text = f"the {how}request body is longer than {max_bytes} bytes"
    return HttpError(413, text, error_code="request_too_large", closes=closes)


class _Named(msgspec.Struct):
    model: str | None = None


_read = msgspec.json.Decoder(_Named).decode


class Models:
    """The served models in configured order; the first is the default."""

    def __init__(self, served: Sequence[Acceptance]) -> None:
        """`served` has at least one."""
        self._served = served
        self._by_name = {name: model for model in served for name in model.names}
        self.first = served[0]
        self.adapters: Callable[[str], Collection[str] | None] = lambda _: ()
        """Names of a model's LoRA adapters, from its workers' heartbeats; None: not known yet."""

    @property
    def names(self) -> tuple[str, ...]:
        """All accepted names: the models' own, then aliases, then adapters."""
        own = [model.name for model in self._served]
        aliases = [name for name in self._by_name if name not in own]
        return (*own, *aliases, *(f"{name}:{each}" for name in own for each in self.adapters(name) or ()))

    def __iter__(self) -> Iterator[Acceptance]:
        return iter(self._served)

    def find(self, name: str) -> Acceptance:
        """Return the model of that name. Raises UnknownModel."""
        if (found := self._by_name.get(name)) is not None:
            return found
        base, _, adapter = name.rpartition(":")
        model = self._by_name.get(base)
        known = () if model is None or not adapter else self.adapters(model.name)
        if model is None or (known is not None and adapter not in known):
            raise unknown_model(name, self.names)
        return model.with_adapter(adapter, name)

    def of(self, body: bytes) -> Acceptance:
        """Return the model that the body names; if it names none or is malformed, the first. The field is
        read before the rest, since the parser belongs to a model. Raises UnknownModel."""
        adapters = self.adapters(self.first.name)
        if len(self._served) == 1 and adapters is not None and not adapters:
            return self.first
        try:
            name = _read(body).model
        except msgspec.DecodeError:
            return self.first
        return self.first if name is None else self.find(name)

    def close(self) -> None:
        for model in self._served:
            model.close()


MakeWriter = Callable[[str, int], AnswerWriter]
"""Makes the writer of an answer with this id and creation time."""


class RequestReader:
    """Reads requests and makes their responses."""

    def __init__(
        self, sessions: Sessions, models: Models, config: GatewayConfig, store: ResponseStore | None
    ) -> None:
        self._sessions = sessions
        self._models = models
        self._config = config
        self._store = store

    async def read(
        self, path: str, body: bytes, record: RequestRecord, as_before: Shadow | None = None
    ) -> Reading:
        """Read and admit a request; `as_before` is another gateway's copy. Raises as admission does."""
        model = self._models.of(body)
        served = model.config.served_name
        limit = partial(self._sessions.context_tokens, self._config.admit_timeout_s, served)
        created = int(unix_s())
        job, write = await SURFACES[path](Asked(model, body, limit, record.tenant, self._store))
        answer_id = job.client_id or record.client_request_id or record.request_id.removeprefix("req_")
        if as_before is not None:
            answer_id, created = as_before.answer_id, as_before.created
            prompts = tuple(tuple(unpack_tokens(prompt)) for prompt in as_before.prompts)
            job = replace(job, prompts=prompts, samplings=as_before.samplings)
        record.note_accepted(job)
        record.model = model.name
        record.figures = self._sessions.counters.models[served]
        return Reading(model, job, write(answer_id, created), answer_id, created)

    def answer(
        self, reading: Reading, record: RequestRecord, deadline: Deadline, lasting: Lasting | None = None
    ) -> CompletionResponse:
        return CompletionResponse(self._sessions, reading, record, deadline, lasting)

    async def read_again(self, shadow: Shadow) -> Callable[[Lasting], CompletionResponse]:
        """Read another gateway's request; return the maker of its response. Raises as admission does."""
        record = RequestRecord("POST", shadow.path, shadow.request_id, tenant=shadow.key, owner=shadow.tenant)
        deadline = Deadline(monotonic_s(), shadow.deadline_in_s)
        reading = await self.read(shadow.path, shadow.body, record, shadow)
        return partial(self.answer, reading, record, deadline)


# --- the APIs


class Asked(NamedTuple):
    """A body, its model, and the digest of its key."""

    model: Acceptance
    body: bytes
    context: ContextLimit
    key: str
    store: ResponseStore | None


Admitted = tuple[AdmittedRequest, MakeWriter]


async def _chat(asked: Asked) -> Admitted:
    model = asked.model
    job = await model.chat(asked.body, asked.context, asked.key)
    return job, partial(_letterhead, job, "chatcmpl", model.name)


async def _text(asked: Asked) -> Admitted:
    model = asked.model
    job = await model.text(asked.body, asked.context, asked.key)
    return job, partial(_letterhead, job, "cmpl", model.name)


def _letterhead(job: AdmittedRequest, prefix: str, model: str, answer_id: str, created: int) -> Letterhead:
    prompts = (
        [prompt for prompt in job.whole_prompts for _ in range(job.n)] if job.n > 1 else job.whole_prompts
    )
    usage = job.include_usage, job.continuous_usage
    return Letterhead(job.kind, f"{prefix}-{answer_id}", created, model, prompts, *usage, job.rules.with_ids)


async def _embeddings(asked: Asked) -> Admitted:
    job, request = await admit_embeddings(asked.model, asked.body, asked.context)
    return job, lambda answer_id, created: EmbeddingWriter(asked.model.name, request)


MESSAGES_WORDS = {
    ".function.parameters": ".input_schema",
    ".function": "",
    "response_format": "output_config.format",
}
RESPONSES_WORDS = {
    ".function": "",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
}
"""Names that these two APIs give to a chat's fields."""


async def _messages(asked: Asked) -> Admitted:
    model, body, context, key, _ = asked
    ignored = model.ignored()
    read = partial(parse_messages, body, model.config.max_messages, ignored)
    chat = await model.threads.read(read, len(body))
    with _named_as(MESSAGES_WORDS):
        job = _in_parts(await model.chat_of(lambda: chat, len(body), context, ignored, key))
    return job, lambda answer_id, _: MessageWriter(f"msg_{answer_id}", model.name, job.prompt_tokens)


async def _responses(asked: Asked) -> Admitted:
    model, body, context, key, store = asked
    most, ignored = model.config.max_messages, model.ignored()
    request = await model.threads.read(
        lambda: parse_response(body, most, ignored, can_store=store is not None), len(body)
    )
    items = conversation_of(request, await _before(request, store, key), most)
    chat = await model.threads.read(lambda: chat_of(request, items, ignored), len(body))
    with _named_as(RESPONSES_WORDS):
        job = _in_parts(await model.chat_of(lambda: chat, len(body), context, ignored, key))

    def write(answer_id: str, created: int) -> AnswerWriter:
        name = f"resp_{answer_id}"
        if store is None or request.store is False:
            return ResponseWriter(name, created, request)

        def keep(answer: bytes, said: list[Any]) -> Future[None]:
            return store.put(key, name, answer, [*items, *said])

        return ResponseWriter(name, created, request, keep)

    return job, write


async def _before(request: ResponseRequest, store: ResponseStore | None, key: str) -> list[Any]:
    name = request.previous_response_id
    if name is None or store is None:
        return []
    try:
        return (await store.find(key, name)).items
    except HttpError as error:
        raise InvalidRequest(str(error), param="previous_response_id") from None


@contextmanager
def _named_as(words: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in InvalidRequest errors to those of the client's API."""
    try:
        yield
    except InvalidRequest as error:
        ours = error.param or ""
        theirs = reduce(lambda name, word: name.replace(*word), words.items(), ours)
        if theirs == ours:
            raise
        raise type(error)(error.message.replace(ours, theirs), param=theirs) from None


def _in_parts(job: AdmittedRequest) -> AdmittedRequest:
    return job if job.reader is not None else replace(job, reader=PlainReader)


SURFACES: Mapping[str, Callable[[Asked], Awaitable[Admitted]]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _text,
    "/v1/embeddings": _embeddings,
    "/v1/messages": _messages,
    "/v1/responses": _responses,
}
