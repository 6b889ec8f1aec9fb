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
        logprobs: dict[str, Any] | None = None,
        stop: str | None = None,
    ) -> bytes:
        """The next piece of a choice; the last one has the reason, and the stop string that it ended at."""
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
    cached_tokens: int

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
    stop: str | None = None
    """The stop string that it ended at."""
    hidden: bytes = b""
    """Of requests that embed: the model's last hidden state, packed fp32."""


@dataclass(frozen=True, slots=True)
class Letterhead:
    """What all bodies of one answer share."""

    kind: ReplyKind
    id: str
    created: int
    model: str
    _frames: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, compare=False, repr=False)
    """What stands before and after the text of a piece, by choice: most events differ in nothing else."""

    def begin(self, index: int) -> bytes:
        """The first delta of a chat choice; a text choice has none."""
        if self.kind == "text":
            return b""
        return self._event([_chat_delta(index, {"role": "assistant", "content": ""}, None)])

    def text_event(
        self, index: int, text: str, finish_reason: str | None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        """A piece of one choice; the last one carries the reason."""
        if text and finish_reason is None and logprobs is None:
            before, after = self._frames.get(index) or self._frame(index)
            return before + orjson.dumps(text) + after
        if self.kind == "text":
            return self._event(
                [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}]
            )
        choice = _chat_delta(index, {"content": text} if text else {}, finish_reason)
        return self._event([choice if logprobs is None else {**choice, "logprobs": logprobs}])

    def piece(
        self,
        index: int,
        parts: Sequence[AnswerPart],
        reason: str | None,
        logprobs: dict[str, Any] | None = None,
        stop: str | None = None,
    ) -> bytes:
        """One event for each part of a piece, and at most one for a piece of a text."""
        if self.kind == "text" or all(isinstance(part, Content) for part in parts):
            text = "".join(part.text for part in parts if isinstance(part, Content))
            return self.text_event(index, text, reason, logprobs)
        deltas = [self._delta(index, part) for part in parts] or [{}]
        events = []
        for at, delta in enumerate(deltas):
            is_last = at == len(deltas) - 1
            choice = _chat_delta(index, delta, reason if is_last else None)
            events.append(self._event([{**choice, "logprobs": logprobs} if is_last and logprobs else choice]))
        return b"".join(events)

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
        before, after = self._event([choice]).rsplit(b'""', 1)
        self._frames[index] = before, after
        return before, after

    def end(self, usage: Usage, *, include_usage: bool) -> bytes:
        """What `stream_options.include_usage` asks for, and the end of the stream."""
        return (self._event([], usage=usage.body()) if include_usage else b"") + DONE

    def failed(self, error: KvasirError) -> bytes:
        return error_event(error) + DONE

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        return orjson.dumps(self._body("", [self._choice(choice) for choice in choices], usage=usage.body()))

    def _choice(self, choice: FinishedChoice) -> dict[str, Any]:
        body: dict[str, Any] = {"index": choice.index}
        if self.kind == "text":
            body["text"] = choice.message.content
        else:
            body["message"] = self._message(choice)
        body |= {"logprobs": choice.logprobs, "finish_reason": choice.finish_reason}
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
