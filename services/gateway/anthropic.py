"""Anthropic's Messages API: converts requests to chats, and writes answers, whole or as events."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import orjson
from pydantic import FailFast, Field

from services.gateway.errors import UnsupportedFeature, body_of, shown, status_of
from services.gateway.openai.fields import ECHOED, MESSAGES_IGNORED, Ignored, settle
from services.gateway.openai.replies import NO_DETAILS, AnswerWriter, FinishedChoice, PieceDetails, Usage
from services.gateway.openai.schemas import MAX_STOPS, NamesModel, StopString, parse_chat, validated
from services.gateway.parts.items import AnswerPart, CallBegun, Content, Reasoning
from shared.errors import ContextOverflow, InvalidRequest, KvasirError

_TOOL_FIELDS = frozenset({"type", "name", "description", "input_schema"})
_LONG = re.compile(rb"-[0-9]{19}|[0-9]{20}")
"""In a body with integers beyond 64 bits, which the fast parser turns into doubles."""
_EFFORTS = {"low", "medium", "high"}


class MessagesRequest(NamesModel):
    """POST /v1/messages."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    system: Any = None
    stop_sequences: Annotated[list[StopString] | None, Field(max_length=MAX_STOPS), FailFast()] = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0)
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None


def parse_messages(
    body: bytes, max_messages: int, ignored: Ignored, *, counts: bool = False
) -> dict[str, Any]:
    """Return the body as a chat for `/v1/chat/completions`; with `counts`, only for token counting. Raises
    InvalidRequest and UnsupportedFeature naming the field."""
    content = parse_chat(body, max_messages)
    if _LONG.search(body) is not None:
        try:
            content["messages"] = json.loads(body).get("messages")
        except RecursionError:
            raise InvalidRequest("messages are nested too deeply", param="messages") from None
    request = validated(MessagesRequest, content)
    settle(request, ignored, MESSAGES_IGNORED)
    if request.max_tokens is None and not counts:
        raise InvalidRequest("max_tokens: Field required", param="max_tokens")
    messages: list[dict[str, Any]] = []
    if request.system is not None:
        messages.append({"role": "system", "content": _text(request.system, "system")})
    for at, message in enumerate(request.messages):
        ignored.others(message, ("role", "content"), "messages", ECHOED)
        messages += _messages(message, f"messages[{at}]")
    chat = {
        "model": request.model,
        "messages": messages,
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences or None,
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        **_tools(request, ignored),
        **_form(request, ignored),
    }
    last = messages[-1]
    if last["role"] == "assistant":  # prefill: the answer continues it
        if last.get("tool_calls"):
            where = f"messages[{len(request.messages) - 1}]"
            raise InvalidRequest(f"{where} has tool_use without a tool_result after it", param=where)
        chat["continue_final_message"] = True
    if request.thinking is not None:
        ignored.others(request.thinking, ("type",), "thinking", ("budget_tokens", "display"))
        chat["chat_template_kwargs"] = {"enable_thinking": request.thinking.get("type") != "disabled"}
    return {name: value for name, value in chat.items() if value is not None}


def _tools(request: MessagesRequest, ignored: Ignored) -> dict[str, Any]:
    if not request.tools:
        return {}
    tools = []
    for tool in request.tools:
        if tool.get("type", "custom") != "custom":
            tools.append(tool)
            continue
        ignored.others(tool, _TOOL_FIELDS, "tools", ("strict", "cache_control", "input_examples"))
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        function["description"] = tool.get("description", "")
        tools.append({"type": "function", "function": function})
    choice = request.tool_choice or {"type": "auto"}
    kinds: dict[Any, Any] = {
        "auto": "auto",
        "any": "required",
        "none": "none",
        "tool": {"type": "function", "function": {"name": choice.get("name")}},
    }
    if choice.get("type") not in kinds:
        raise InvalidRequest("tool_choice.type is auto, any, tool or none", param="tool_choice.type")
    is_parallel = not choice.get("disable_parallel_tool_use")
    return {"tools": tools, "tool_choice": kinds[choice["type"]], "parallel_tool_calls": is_parallel}


def _form(request: MessagesRequest, ignored: Ignored) -> dict[str, Any]:
    config = request.output_config or {}
    ignored.others(config, ("format", "effort"), "output_config", ("task_budget",))
    wanted = request.output_format or config.get("format")
    found: dict[str, Any] = {}
    if wanted is not None:
        if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
            raise UnsupportedFeature("output_format.type should be json_schema", param="output_format")
        schema = {"name": "output", "schema": wanted.get("schema")}
        found["response_format"] = {"type": "json_schema", "json_schema": schema}
    if config.get("effort") in _EFFORTS:
        found["reasoning_effort"] = config["effort"]
    return found


def _messages(message: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    """Return the chat messages; tool results become separate ones."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system", "developer"):
        text = f"{path}.role should be user, assistant or system"
        raise InvalidRequest(text, param=f"{path}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise InvalidRequest(f"{path}.content should be a text or a list of blocks", param=f"{path}.content")
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for at, block in enumerate(content):
        where = f"{path}.content[{at}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(_text(block.get("text"), f"{where}.text"))
        elif kind == "tool_use" and role == "assistant":
            if not isinstance(block.get("name"), str):
                raise InvalidRequest(f"{where}.name should be a text", param=f"{where}.name")
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            text = _text(block.get("content") or "", f"{where}.content")
            results.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": text})
        elif kind in ("thinking", "redacted_thinking") and role == "assistant":
            thoughts.append(str(block.get("thinking") or ""))
        else:
            text = f"content blocks of type {shown(repr(kind), 100)} are not supported in a message of {role}"
            raise UnsupportedFeature(text, param=f"{where}.type")
    if role != "assistant":
        return results + ([{"role": role, "content": "\n".join(texts)}] if texts else [])
    said: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if calls:
        said["tool_calls"] = calls
    if any(thoughts):
        said["reasoning_content"] = "\n".join(thoughts)
    return [said]


def _text(value: Any, path: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(
        isinstance(each, dict) and each.get("type") == "text" for each in value
    ):
        return "\n".join(_text(each.get("text"), f"{path}.text") for each in value)
    raise UnsupportedFeature(f"{path} should be a text, or blocks of text", param=path)


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
            said = {"id": self._call_id(at), "name": call.name, "input": _input(call.arguments)}
            blocks.append({"type": "tool_use", **said})
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
