"""The APIs, each a request reader and an answer writer around the same job."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

from services.gateway.anthropic.replies import MessageWriter
from services.gateway.anthropic.requests import parse_messages
from services.gateway.config import GatewayConfig
from services.gateway.errors import HttpError
from services.gateway.http.middleware import RequestRecord
from services.gateway.openai.admission import Acceptance, AdmittedRequest, ContextLimit
from services.gateway.openai.embeddings import EmbeddingWriter, admit_embeddings
from services.gateway.openai.replies import AnswerWriter, Extras, Letterhead, ReplyKind
from services.gateway.openai.response_replies import ResponseWriter
from services.gateway.openai.response_requests import (
    ResponseRequest,
    chat_of,
    conversation_of,
    parse_response,
)
from services.gateway.openai.response_store import ResponseStore
from services.gateway.parts.readers import PlainReader
from shared.clock import unix_s
from shared.errors import InvalidRequest

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


@dataclass(frozen=True, slots=True)
class Naming:
    """Id and creation time of an answer."""

    record: RequestRecord
    config: GatewayConfig
    store: ResponseStore | None = None
    answer_id: str | None = None
    """Set, with `created_s`, when another gateway has already announced them."""
    created_s: int | None = None

    @property
    def created(self) -> int:
        """Unix time, in seconds."""
        return int(unix_s()) if self.created_s is None else self.created_s

    def id(self, job: AdmittedRequest) -> str:
        if self.answer_id is not None:
            return self.answer_id
        record = self.record
        return job.client_id or record.client_request_id or record.request_id.removeprefix("req_")


Surface = Callable[[Acceptance, bytes, ContextLimit, Naming], Awaitable[tuple[AdmittedRequest, AnswerWriter]]]


async def _chat(
    acceptance: Acceptance, body: bytes, context: ContextLimit, naming: Naming
) -> tuple[AdmittedRequest, AnswerWriter]:
    job = await acceptance.chat(body, context, naming.record.tenant)
    return job, _letterhead("chat", f"chatcmpl-{naming.id(job)}", job, naming)


async def _text(
    acceptance: Acceptance, body: bytes, context: ContextLimit, naming: Naming
) -> tuple[AdmittedRequest, AnswerWriter]:
    job = await acceptance.text(body, context, naming.record.tenant)
    return job, _letterhead("text", f"cmpl-{naming.id(job)}", job, naming)


def _letterhead(kind: ReplyKind, name: str, job: AdmittedRequest, naming: Naming) -> Letterhead:
    prompts = [prompt for prompt in job.whole_prompts for _ in range(job.n)]
    extras = Extras(prompts, job.include_usage, job.continuous_usage, job.rules.with_ids)
    return Letterhead(kind, name, naming.created, naming.config.served_name, extras)


async def _messages(
    acceptance: Acceptance, body: bytes, context: ContextLimit, naming: Naming
) -> tuple[AdmittedRequest, AnswerWriter]:
    ignored = acceptance.ignored()
    read = partial(parse_messages, body, naming.config.max_messages, ignored)
    chat = await acceptance.threads.read(read, len(body))
    with _named_as(MESSAGES_WORDS):
        key = naming.record.tenant
        job = _in_parts(await acceptance.chat_of(lambda: chat, len(body), context, ignored, key))
    return job, MessageWriter(f"msg_{naming.id(job)}", naming.config.served_name, job.prompt_tokens)


async def _responses(
    acceptance: Acceptance, body: bytes, context: ContextLimit, naming: Naming
) -> tuple[AdmittedRequest, AnswerWriter]:
    store, key, most = naming.store, naming.record.tenant, naming.config.max_messages
    ignored = acceptance.ignored()
    request = await acceptance.threads.read(
        lambda: parse_response(body, most, ignored, can_store=store is not None), len(body)
    )
    before = await _before(request, store, key)
    items = conversation_of(request, before, most)
    chat = await acceptance.threads.read(lambda: chat_of(request, items, ignored), len(body))
    with _named_as(RESPONSES_WORDS):
        job = _in_parts(await acceptance.chat_of(lambda: chat, len(body), context, ignored, key))
    name = f"resp_{naming.id(job)}"
    keep = None
    if store is not None and request.store is not False:

        def keep(answer: bytes, said: list[Any]) -> None:
            store.put(key, name, answer, [*items, *said])

    return job, ResponseWriter(name, naming.created, request, keep)


async def _before(request: ResponseRequest, store: ResponseStore | None, key: str) -> list[Any]:
    """Return the items of the request's previous response."""
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


async def _embeddings(
    acceptance: Acceptance, body: bytes, context: ContextLimit, naming: Naming
) -> tuple[AdmittedRequest, AnswerWriter]:
    job, request = await admit_embeddings(acceptance, body, context)
    return job, EmbeddingWriter(naming.config.served_name, request)


SURFACES: Mapping[str, Surface] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _text,
    "/v1/embeddings": _embeddings,
    "/v1/messages": _messages,
    "/v1/responses": _responses,
}
