"""Answers in the format of Anthropic's Messages API, whole or as events."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from services.gateway.errors import body_of, status_of
from services.gateway.openai.replies import NO_DETAILS, AnswerWriter, FinishedChoice, PieceDetails, Usage
from services.gateway.parts.items import AnswerPart, CallBegun, Content, Reasoning
from shared.errors import ContextOverflow, KvasirError

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: KvasirError) -> dict[str, Any]:
    """Return the error in this API's format."""
    kind = _KINDS.get(status_of(error)[0], "api_error")
    about = body_of(error)["error"]
    message, param = about["message"] or "", about["param"] or ""
    if param not in message:  # Anthropic's errors have no separate field for the name
        message = f"{param}: {message}"
    if isinstance(error, ContextOverflow) and error.tokens is not None:
        message = _too_long(*error.tokens)
    return {"type": "error", "error": {"type": kind, "message": message}}


def _too_long(prompt: int, answer: int, context: int) -> str:
    """Return the message that Claude Code matches to compact the chat or lower `max_tokens`."""
    if prompt >= context:
        return f"prompt is too long: {prompt} tokens > {context} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {answer} > {context}, "
        "decrease input length or `max_tokens` and try again"
    )


@dataclass(slots=True)
class MessageWriter(AnswerWriter):
    """Writer of one answer."""

    id: str
    model: str
    prompt_tokens: int
    _block: int = -1
    _kind: str = ""
    _stop: dict[str, Any] = field(default_factory=lambda: {"stop_reason": None, "stop_sequence": None})

    def begin(self, index: int) -> bytes:
        message = self._message([], Usage(self.prompt_tokens, 0, 0))
        return _event("message_start", message=message) + _event("ping")

    def piece(
        self, index: int, parts: Sequence[AnswerPart], reason: str | None, details: PieceDetails = NO_DETAILS
    ) -> bytes:
        """Return the events of a piece."""
        events = [self._part(part) for part in parts]
        if reason is not None:
            self._stop = _stop(reason, details.stop)
            events.append(self._close())
        return b"".join(events)

    def end(self, usage: Usage, *, include_usage: bool) -> bytes:
        return _event("message_delta", delta=self._stop, usage=_usage(usage)) + _event("message_stop")

    def failed(self, error: KvasirError) -> bytes:
        return _event("error", **{"error": error_body(error)["error"]})

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        (choice,) = choices
        message, blocks = choice.message, list[dict[str, Any]]()
        if message.reasoning:
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
        if message.content or not message.calls:
            blocks.append({"type": "text", "text": message.content})
        for at, call in enumerate(message.calls):
            blocks.append(
                {
                    "type": "tool_use",
                    "id": self._call_id(at),
                    "name": call.name,
                    "input": _input(call.arguments),
                }
            )
        return orjson.dumps({**self._message(blocks, usage), **_stop(choice.finish_reason, choice.stop)})

    def _message(self, blocks: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": blocks}
        return {**head, "stop_reason": None, "stop_sequence": None, "usage": _usage(usage)}

    def _part(self, part: AnswerPart) -> bytes:
        if isinstance(part, Content):
            opened = self._open("text", {"type": "text", "text": ""})
            return opened + self._delta({"type": "text_delta", "text": part.text})
        if isinstance(part, Reasoning):
            opened = self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return opened + self._delta({"type": "thinking_delta", "thinking": part.text})
        if isinstance(part, CallBegun):
            block = {"type": "tool_use", "id": self._call_id(part.index), "name": part.name, "input": {}}
            return self._close() + self._open("tool_use", block)
        return self._delta({"type": "input_json_delta", "partial_json": part.text})

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        if self._kind == kind and kind != "tool_use":
            return b""
        closed = self._close()
        self._kind, self._block = kind, self._block + 1
        return closed + _event("content_block_start", index=self._block, content_block=block)

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        self._kind = ""
        return _event("content_block_stop", index=self._block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._block, delta=delta)

    def _call_id(self, at: int) -> str:
        return f"toolu_{self.id.removeprefix('msg_')}_{at}"


def _stop(reason: str, stop: str | int | None) -> dict[str, Any]:
    if stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": _REASONS.get(reason, reason), "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _input(arguments: str) -> Any:
    """Return the arguments as an object with its numbers' exact digits; keep invalid JSON as text."""
    text = arguments or "{}"
    try:
        found = json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return {"arguments": arguments}
    written = orjson.Fragment(text)
    return written if isinstance(found, dict) else {"arguments": written}


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _event(name: str, /, **fields: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps({"type": name, **fields}) + b"\n\n"
