"""Bodies of successful answers in OpenAI's format. Optional fields are omitted; required ones may be null."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

import orjson

from services.gateway.errors import body_of
from services.gateway.parts.items import AnswerMessage, AnswerPart, CallBegun, Content, Reasoning
from services.gateway.text.choice_text import PlacedToken
from services.gateway.text.tokenizer import Vocabulary
from shared.errors import KvasirError
from shared.messages.tokens import TokenLogprobs

LOWEST = -9999.0
"""Value that OpenAI and vLLM use for a nearly impossible token."""


def chat_logprobs(placed: Sequence[PlacedToken], vocabulary: Vocabulary, top: int) -> dict[str, Any]:
    """Return a chat's `choices[].logprobs`: each token with its `top` likeliest alternatives."""
    content = []
    for item in placed:
        if item.logprobs is None:
            continue
        likeliest = [_entry(token, value, vocabulary) for token, value in item.logprobs.top[:top]]
        chosen = _entry(item.token, item.logprobs.chosen, vocabulary)
        content.append({**chosen, "top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def text_logprobs(placed: Sequence[PlacedToken], vocabulary: Vocabulary, top: int) -> dict[str, Any]:
    """Return a completion's `choices[].logprobs` as parallel lists; `top_logprobs` includes the chosen
    token."""
    return {
        "tokens": [vocabulary.text(item.token) for item in placed],
        "token_logprobs": [item.logprobs and finite(item.logprobs.chosen) for item in placed],
        "top_logprobs": [_by_text(item, vocabulary, top) for item in placed],
        "text_offset": [item.offset for item in placed],
    }


def finite(value: float) -> float:
    """Return `value`, or `LOWEST` if it is lower or not finite."""
    return max(value, LOWEST) if math.isfinite(value) else LOWEST


def _entry(token: int, value: float, vocabulary: Vocabulary) -> dict[str, Any]:
    data = vocabulary.bytes_of(token)
    return {"token": vocabulary.text(token), "logprob": finite(value), "bytes": list(data)}


def prompt_logprobs(
    prompt: Sequence[int], logprobs: Sequence[TokenLogprobs | None], vocabulary: Vocabulary, top: int
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: by id, the token's own and the likeliest; None for the first token."""
    return [
        None if found is None else _by_id(token, found, vocabulary, top)
        for token, found in zip(prompt, logprobs, strict=False)
    ]


def _by_id(token: int, found: TokenLogprobs, vocabulary: Vocabulary, top: int) -> dict[str, Any]:
    ranked = [(each, value, rank + 1) for rank, (each, value) in enumerate(found.top)]
    rank = next((rank for each, _, rank in ranked if each == token), None)
    shown = [each for each in ranked[:top] if each[0] != token] + [(token, found.chosen, rank)]
    return {
        str(each): {"logprob": finite(value), "rank": at, "decoded_token": vocabulary.text(each)}
        for each, value, at in shown
    }


def _by_text(item: PlacedToken, vocabulary: Vocabulary, top: int) -> dict[str, float] | None:
    """Return log-probabilities by text, likeliest first. If ids share a text, the chosen or likelier one
    counts."""
    if item.logprobs is None:
        return None
    found: dict[str, float] = {}
    for token, value in item.logprobs.top[:top]:
        found.setdefault(vocabulary.text(token), finite(value))
    found[vocabulary.text(item.token)] = finite(item.logprobs.chosen)
    return found


DONE = b"data: [DONE]\n\n"

ReplyKind = Literal["chat", "text", "embedding"]


@dataclass(frozen=True, slots=True)
class PieceDetails:
    """Details of a piece besides its parts."""

    logprobs: dict[str, Any] | None = None
    stop: str | int | None = None
    """The stop string, or the client's stop token, that ended the choice."""
    token_ids: Sequence[int] | None = None
    completion_tokens: int = 0


NO_DETAILS = PieceDetails()


class AnswerWriter(ABC):
    """Writes one answer in the format of one API; by itself, one that is never streamed."""

    __slots__ = ()
    stored: Future[None] | None = None
    """The writing of what was said to a file; the client has the last bytes once it is committed."""

    def begin(self, index: int) -> bytes:
        """Return the bytes before a choice's first piece."""
        return b""

    def piece(
        self, index: int, parts: Sequence[AnswerPart], reason: str | None, details: PieceDetails = NO_DETAILS
    ) -> bytes:
        """Return the choice's next piece; the last one has a reason."""
        return b""

    def end(self, usage: "Usage", *, include_usage: bool) -> bytes:
        """Return the bytes after all choices."""
        return DONE

    def failed(self, error: KvasirError) -> bytes:
        """Return the bytes that end an incomplete answer."""
        return b"data: " + orjson.dumps(body_of(error)) + b"\n\n" + DONE

    @abstractmethod
    def whole(self, choices: "Sequence[FinishedChoice]", usage: "Usage") -> bytes:
        """Return the body of an answer that is not streamed."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; `completion_tokens` includes the tokens that ended the choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: dict[str, Any] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    stop: str | int | None = None
    hidden: bytes = b""
    """For embeddings: the model's last hidden state, as packed fp32."""
    token_ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Letterhead(AnswerWriter):
    """Writer of chats and completions, and the fields that all bodies of one answer share."""

    kind: ReplyKind
    id: str
    created: int
    model: str
    prompts: Sequence[Sequence[int]] = ()
    include_usage: bool = False
    continuous_usage: bool = False
    """Usage in every event; needs `include_usage`."""
    token_ids: bool = False
    _frames: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, compare=False, repr=False)
    """Bytes before and after a piece's text, by choice: most events differ only in the text."""

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompts[index]} if self.token_ids else {}

    def _usage(self, index: int, completion_tokens: int) -> dict[str, Any]:
        if not self.include_usage:
            return {}
        if not self.continuous_usage:
            return {"usage": None}
        return {"usage": Usage(len(self.prompts[index]), completion_tokens).body()}

    def begin(self, index: int) -> bytes:
        """Return a chat choice's first delta; a text choice has one only for prompt ids."""
        ids, usage = self._prompt_ids(index), self._usage(index, 0)
        if self.kind == "text":
            choice = {"index": index, "text": "", "logprobs": None, "finish_reason": None, **ids}
            return self._event([choice], **usage) if ids else b""
        return self._event([_chat_delta(index, {"role": "assistant", "content": ""}, None)], **usage, **ids)

    def text_event(
        self, index: int, text: str, finish_reason: str | None, details: PieceDetails = NO_DETAILS
    ) -> bytes:
        """Return the event of a choice's text; the last one has a reason."""
        is_plain = details.logprobs is None and details.token_ids is None
        if text and finish_reason is None and is_plain and not self.continuous_usage:
            before, after = self._frames.get(index) or self._frame(index)
            return before + orjson.dumps(text) + after
        if self.kind == "text":
            choice = {"index": index, "text": text, "logprobs": details.logprobs}
            return self._piece_event({**choice, "finish_reason": finish_reason}, details)
        return self._piece_event(
            _chat_delta(index, {"content": text} if text else {}, finish_reason), details
        )

    def _piece_event(self, choice: dict[str, Any], details: PieceDetails) -> bytes:
        if details.logprobs is not None:
            choice["logprobs"] = details.logprobs
        if details.token_ids is not None:
            choice["token_ids"] = details.token_ids
        if choice["finish_reason"] is not None:
            choice["stop_reason"] = details.stop
        return self._event([choice], **self._usage(choice["index"], details.completion_tokens))

    def piece(
        self, index: int, parts: Sequence[AnswerPart], reason: str | None, details: PieceDetails = NO_DETAILS
    ) -> bytes:
        """Return one event per part, but at most one for text alone."""
        text = ""
        for part in parts:
            if isinstance(part, Content):
                text += part.text
            elif self.kind != "text":
                break
        else:
            return self.text_event(index, text, reason, details)
        *deltas, last = [self._delta(index, part) for part in parts]
        usage = self._usage(index, details.completion_tokens)
        events = [self._event([_chat_delta(index, delta, None)], **usage) for delta in deltas]
        return b"".join([*events, self._piece_event(_chat_delta(index, last, reason), details)])

    def _delta(self, index: int, part: AnswerPart) -> dict[str, Any]:
        if isinstance(part, Content):
            return {"content": part.text}
        if isinstance(part, Reasoning):
            return {"reasoning_content": part.text}
        if isinstance(part, CallBegun):
            call = _call_body(self.call_id(index, part.index), part.name, "")
            return {"tool_calls": [{"index": part.index, **call}]}
        return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}

    def call_id(self, choice: int, call: int) -> str:
        digest = blake2b(f"{self.id}/{choice}/{call}".encode(), digest_size=12).hexdigest()
        return f"call_{digest}"

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """Return the bytes around an event's text; no other empty string follows the text."""
        if self.kind == "text":
            choice = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
        else:
            choice = _chat_delta(index, {"content": ""}, None)
        before, after = self._event([choice], **self._usage(index, 0)).rsplit(b'""', 1)
        self._frames[index] = before, after
        return before, after

    def end(self, usage: Usage, *, include_usage: bool) -> bytes:
        """Return the usage event, if requested, and the end of the stream."""
        return (self._event([], usage=usage.body()) if include_usage else b"") + DONE

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        ids = self._prompt_ids(0) if self.kind == "chat" else {}
        bodies = [self._choice(choice) for choice in choices]
        return orjson.dumps(self._body("", bodies, usage=usage.body(), **ids))

    def _choice(self, choice: FinishedChoice) -> dict[str, Any]:
        body: dict[str, Any] = {"index": choice.index}
        if self.kind == "text":
            body["text"] = choice.message.content
        else:
            body["message"] = self._message(choice)
        body |= {"logprobs": choice.logprobs, "finish_reason": choice.finish_reason}
        body["stop_reason"] = choice.stop
        if choice.token_ids is not None:
            body["token_ids"] = choice.token_ids
            body |= self._prompt_ids(choice.index) if self.kind == "text" else {}
        return body if choice.prompt_logprobs is None else {**body, "prompt_logprobs": choice.prompt_logprobs}

    def _message(self, choice: FinishedChoice) -> dict[str, Any]:
        message = choice.message
        content = None if message.calls and not message.content else message.content
        body: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if message.reasoning:
            body["reasoning_content"] = message.reasoning
        if message.calls:
            body["tool_calls"] = [
                _call_body(self.call_id(choice.index, at), call.name, call.arguments)
                for at, call in enumerate(message.calls)
            ]
        return body

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + orjson.dumps(self._body(".chunk", choices, **more)) + b"\n\n"

    def _body(self, suffix: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        name = "text_completion" if self.kind == "text" else f"chat.completion{suffix}"
        head = {"id": self.id, "object": name, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}


def model_body(name: str, created: int, max_model_len: int | None) -> dict[str, Any]:
    body: dict[str, Any] = {"id": name, "object": "model", "created": created, "owned_by": "kvasir"}
    return body if max_model_len is None else body | {"max_model_len": max_model_len}


def _call_body(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _chat_delta(index: int, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": finish_reason}
