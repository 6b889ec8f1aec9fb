"""Bodies of successful answers, as OpenAI's schema has them.

Optional fields are left out; required ones may be null. Knows texts and counts; nothing of sequences or of
how an answer came about.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, Protocol

import orjson

from services.gateway.errors import body_of
from services.gateway.parts.items import AnswerMessage, AnswerPart, CallBegun, Content, Reasoning
from services.gateway.text.choice_text import PlacedToken
from services.gateway.text.tokenizer import Vocabulary
from shared.errors import KvasirError
from shared.messages.tokens import TokenLogprobs

LOWEST = -9999.0
"""What OpenAI and vLLM write for a token that is next to impossible."""


def chat_logprobs(placed: Sequence[PlacedToken], vocabulary: Vocabulary, top: int) -> dict[str, Any]:
    """`choices[].logprobs` of a chat: each token with its `top` likeliest alternatives."""
    content = []
    for item in placed:
        if item.logprobs is None:
            continue
        likeliest = [_entry(token, value, vocabulary) for token, value in item.logprobs.top[:top]]
        chosen = _entry(item.token, item.logprobs.chosen, vocabulary)
        content.append({**chosen, "top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def text_logprobs(placed: Sequence[PlacedToken], vocabulary: Vocabulary, top: int) -> dict[str, Any]:
    """`choices[].logprobs` of a completion: parallel lists; the chosen token is always in `top_logprobs`."""
    return {
        "tokens": [vocabulary.text(item.token) for item in placed],
        "token_logprobs": [item.logprobs and finite(item.logprobs.chosen) for item in placed],
        "top_logprobs": [_by_text(item, vocabulary, top) for item in placed],
        "text_offset": [item.offset for item in placed],
    }


def finite(value: float) -> float:
    """`value`, or `LOWEST` where it is lower, infinite or no number."""
    return max(value, LOWEST) if math.isfinite(value) else LOWEST


def _entry(token: int, value: float, vocabulary: Vocabulary) -> dict[str, Any]:
    data = vocabulary.bytes_of(token)
    return {"token": vocabulary.text(token), "logprob": finite(value), "bytes": list(data)}


def prompt_logprobs(
    prompt: Sequence[int], logprobs: Sequence[TokenLogprobs | None], vocabulary: Vocabulary, top: int
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` as in vLLM: by id, the token's own and the likeliest; the first token has none."""
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
    """By text, the likeliest first. Of two ids with one text the likelier counts, or the chosen one."""
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
    """What comes with a piece of a choice, besides what it says."""

    logprobs: dict[str, Any] | None = None
    stop: str | int | None = None
    """The stop string, or the client's stop token, that the choice ended at."""
    token_ids: Sequence[int] | None = None
    completion_tokens: int = 0
    """Of the choice, up to and with this piece."""


NO_DETAILS = PieceDetails()


class AnswerWriter(Protocol):
    """Writes one answer in the shapes of one API."""

    def begin(self, index: int) -> bytes:
        """Before the first piece of a choice."""
        ...

    def piece(
        self,
        index: int,
        parts: Sequence[AnswerPart],
        reason: str | None,
        details: PieceDetails = NO_DETAILS,
    ) -> bytes:
        """The next piece of a choice; the last one has the reason."""
        ...

    def end(self, usage: "Usage", *, include_usage: bool) -> bytes:
        """After all choices."""
        ...

    def failed(self, error: KvasirError) -> bytes:
        """Instead of that, when the answer is not complete."""
        ...

    def whole(self, choices: "Sequence[FinishedChoice]", usage: "Usage") -> bytes:
        """The body of an answer that is not streamed."""
        ...


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; `completion_tokens` counts each choice up to and including what ended
    it.
    """

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
    """As of the last piece."""
    hidden: bytes = b""
    """Of requests that embed: the model's last hidden state, packed fp32."""
    token_ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Extras:
    """What a client wants besides the answer; `prompts` are by choice."""

    prompts: Sequence[Sequence[int]] = ()
    include_usage: bool = False
    continuous_usage: bool = False
    """With it, in every event."""
    token_ids: bool = False

    def prompt_ids(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompts[index]} if self.token_ids else {}

    def usage(self, index: int, completion_tokens: int) -> dict[str, Any]:
        """As an event has it that is not the last."""
        if not self.include_usage:
            return {}
        if not self.continuous_usage:
            return {"usage": None}
        return {"usage": Usage(len(self.prompts[index]), completion_tokens).body()}


@dataclass(frozen=True, slots=True)
class Letterhead:
    """What all bodies of one answer share."""

    kind: ReplyKind
    id: str
    created: int
    model: str
    extras: Extras = Extras()
    _frames: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, compare=False, repr=False)
    """What stands before and after the text of a piece, by choice: most events differ in nothing else."""

    def begin(self, index: int) -> bytes:
        """The first delta of a chat choice; a text choice has none, but for the prompt's tokens."""
        ids, usage = self.extras.prompt_ids(index), self.extras.usage(index, 0)
        if self.kind == "text":
            choice = {"index": index, "text": "", "logprobs": None, "finish_reason": None, **ids}
            return self._event([choice], **usage) if ids else b""
        return self._event([_chat_delta(index, {"role": "assistant", "content": ""}, None)], **usage, **ids)

    def text_event(
        self, index: int, text: str, finish_reason: str | None, details: PieceDetails = NO_DETAILS
    ) -> bytes:
        """A piece of one choice; the last one carries the reason."""
        is_plain = details.logprobs is None and details.token_ids is None
        if text and finish_reason is None and is_plain and not self.extras.continuous_usage:
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
        return self._event([choice], **self.extras.usage(choice["index"], details.completion_tokens))

    def piece(
        self,
        index: int,
        parts: Sequence[AnswerPart],
        reason: str | None,
        details: PieceDetails = NO_DETAILS,
    ) -> bytes:
        """One event for each part of a piece, and at most one for a piece of a text."""
        if self.kind == "text" or all(isinstance(part, Content) for part in parts):
            text = "".join(part.text for part in parts if isinstance(part, Content))
            return self.text_event(index, text, reason, details)
        *deltas, last = [self._delta(index, part) for part in parts]
        usage = self.extras.usage(index, details.completion_tokens)
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
        """Of a call in that choice."""
        digest = blake2b(f"{self.id}/{choice}/{call}".encode(), digest_size=12).hexdigest()
        return f"call_{digest}"

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """An event around an empty text: nothing after that is an empty string, too."""
        if self.kind == "text":
            choice = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
        else:
            choice = _chat_delta(index, {"content": ""}, None)
        before, after = self._event([choice], **self.extras.usage(index, 0)).rsplit(b'""', 1)
        self._frames[index] = before, after
        return before, after

    def end(self, usage: Usage, *, include_usage: bool) -> bytes:
        """What `stream_options.include_usage` asks for, and the end of the stream."""
        return (self._event([], usage=usage.body()) if include_usage else b"") + DONE

    def failed(self, error: KvasirError) -> bytes:
        return error_event(error) + DONE

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        ids = self.extras.prompt_ids(0) if self.kind == "chat" else {}
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
            body |= self.extras.prompt_ids(choice.index) if self.kind == "text" else {}
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


def error_event(error: KvasirError) -> bytes:
    """What a stream that has begun ends with when its answer is not complete; `DONE` follows it, too."""
    return b"data: " + orjson.dumps(body_of(error)) + b"\n\n"


def model_body(name: str, created: int, max_model_len: int | None) -> dict[str, Any]:
    """One entry of /v1/models."""
    body: dict[str, Any] = {"id": name, "object": "model", "created": created, "owned_by": "kvasir"}
    return body if max_model_len is None else body | {"max_model_len": max_model_len}


def _call_body(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _chat_delta(index: int, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": finish_reason}
