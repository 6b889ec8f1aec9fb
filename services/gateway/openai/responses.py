"""OpenAI's Responses API: converts requests to chats, and writes answers and lists of items."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic import Field

from services.gateway.errors import UnsupportedFeature, body_of, shown
from services.gateway.openai.fields import RESPONSES_IGNORED, Ignored, settle
from services.gateway.openai.replies import NO_DETAILS, AnswerWriter, FinishedChoice, PieceDetails, Usage
from services.gateway.openai.schemas import MAX_ENTRIES, NamesModel, parse_object, validated
from services.gateway.openai.tools import full_name
from services.gateway.parts.items import AnswerPart, CallArguments, CallBegun, Content, Reasoning
from shared.errors import InvalidRequest, KvasirError, UnavailableError

_STATE = {"conversation": "send the whole conversation as input", "prompt": "send the text itself"}
_STORED = {"store": "leave it out", "background": "leave it out, and stream"}
_STORED |= {"previous_response_id": "send the whole conversation as input"}
_ROLES = ("user", "assistant", "system", "developer")
_ITEM_FIELDS = frozenset(
    {"type", "id", "status", "role", "content", "call_id", "namespace", "name", "arguments", "output"}
    | {"summary", "phase"}
)
_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")


class ResponseRequest(NamesModel):
    """POST /v1/responses."""

    input: Any
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = Field(None, min_length=1, max_length=128)


def parse_response(
    body: bytes, max_messages: int, ignored: Ignored, *, can_store: bool = False
) -> ResponseRequest:
    """Return the parsed request. Raises InvalidRequest and UnsupportedFeature naming the field."""
    content = parse_object(body, max(MAX_ENTRIES, 8 * max_messages))
    request = validated(ResponseRequest, content)
    for name, value in (request.model_extra or {}).items():
        if name in _STATE and value not in (None, False):
            raise UnsupportedFeature(f"{name} is not supported by this server: {_STATE[name]}", param=name)
    settle(request, ignored, RESPONSES_IGNORED | _STATE.keys())
    if not can_store:
        _refuse_stored(request)
    if request.background and request.store is False:
        raise InvalidRequest("a response in the background is stored: leave store out", param="store")
    return request


def _refuse_stored(request: ResponseRequest) -> None:
    for name, instead in _STORED.items():
        if getattr(request, name):
            where = "by this server (gateway.stored_responses names no file)"
            raise UnsupportedFeature(f"{name} is not supported {where}: {instead}", param=name)


def conversation_of(request: ResponseRequest, before: list[Any], max_messages: int) -> list[Any]:
    """Return the earlier items and the request's own. Raises InvalidRequest."""
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    if not isinstance(items, list) or not items or len(before) + len(items) > max_messages:
        text = f"input should be a text or a list of 1 to {max_messages} items, those before among them"
        raise InvalidRequest(text, param="input")
    return [*before, *items]


def chat_of(request: ResponseRequest, items: list[Any], ignored: Ignored) -> dict[str, Any]:
    """Return the whole conversation as a chat for `/v1/chat/completions`. Raises InvalidRequest and
    UnsupportedFeature naming the field."""
    for item in items:
        ignored.others(item if isinstance(item, dict) else {}, _ITEM_FIELDS, "input", ("encrypted_content",))
    ignored.others(request.reasoning, ("effort",), "reasoning", ("summary", "generate_summary"))
    ignored.others(request.text, ("format",), "text", ("verbosity",))
    chat = {
        "model": request.model,
        "messages": _messages(request, items),
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stream": request.stream,
        "tools": [_tool(tool) for tool in request.tools or ()] or None,
        "tool_choice": _choice(request.tool_choice) if request.tools else None,
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _form(request.text),
        "reasoning_effort": (request.reasoning or {}).get("effort"),
    }
    if request.top_logprobs:
        chat |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    return {name: value for name, value in chat.items() if value is not None}


def _tool(tool: Any) -> Any:
    if isinstance(tool, dict) and tool.get("type") == "namespace" and isinstance(tool.get("tools"), list):
        return {**tool, "tools": [_tool(each) for each in tool["tools"]]}
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def in_namespaces(tools: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the `namespace` and `name` of each namespaced function, by its full name."""
    spaces = [
        tool for tool in tools if tool.get("type") == "namespace" and isinstance(tool.get("tools"), list)
    ]
    return {
        full_name(space["name"], tool["name"]): {"namespace": space["name"], "name": tool["name"]}
        for space in spaces
        for tool in space["tools"]
        if isinstance(space.get("name"), str) and isinstance(tool.get("name"), str)
    }


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": _called(choice)}}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools = choice["tools"] if isinstance(choice.get("tools"), list) else []
        own = [tool for tool in tools if isinstance(tool, dict) and tool.get("type") == "function"]
        if own:
            functions = [{"name": _called(tool)} for tool in own]
            return {"type": "allowed_tools", "allowed_tools": {**choice, "tools": functions}}
        return choice if choice.get("mode") == "required" else "none"
    return choice


def _form(text: Mapping[str, Any] | None) -> Any:
    wanted = (text or {}).get("format")
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": wanted}


def _messages(request: ResponseRequest, items: list[Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    for at, item in enumerate(items):
        _add(item if isinstance(item, dict) else {}, f"input[{at}]", messages)
    return messages


def _add(item: Mapping[str, Any], path: str, messages: list[dict[str, Any]]) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        if item.get("role") not in _ROLES:
            raise InvalidRequest(f"{path}.role should be one of {', '.join(_ROLES)}", param=f"{path}.role")
        messages.append({"role": item["role"], "content": _text(item.get("content"), f"{path}.content")})
    elif kind == "function_call":
        if not isinstance(item.get("name"), str):
            raise InvalidRequest(f"{path}.name should be a text", param=f"{path}.name")
        function = {"name": _called(item), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        text = _text(item.get("output"), f"{path}.output")
        messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": text})
    elif kind == "reasoning":
        thoughts = _text(item.get("content") or "", f"{path}.content")
        if thoughts:
            messages.append({"role": "assistant", "content": "", "reasoning_content": thoughts})
    else:
        text = f"items of type {shown(repr(kind), 100)} are not supported"
        raise UnsupportedFeature(text, param=f"{path}.type")


def _called(item: Mapping[str, Any]) -> Any:
    return full_name(item.get("namespace"), item.get("name"))


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last message if it is the assistant's, else append a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(value: Any, path: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(
        isinstance(part, dict) and part.get("type") in _TEXTS for part in value
    ):
        return "\n".join(str(part.get("text") or part.get("refusal") or "") for part in value)
    raise UnsupportedFeature(f"{path} should be a text, or parts of text", param=path)


_FAILED = "server_error"
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_MOST_LISTED = 100


@dataclass(slots=True)
class ResponseWriter(AnswerWriter):
    """Writer of one answer."""

    id: str
    created: int
    request: ResponseRequest
    keep: Callable[[bytes, list[Any]], Future[None]] | None = None
    stored: Future[None] | None = None
    _number: int = 0
    _items: list[dict[str, Any]] = field(default_factory=list)
    _open: dict[str, Any] | None = None
    _reason: str = "stop"
    _spaces: dict[str, dict[str, str]] = field(init=False)
    """Namespace and name of functions, by the model's name for them."""

    def __post_init__(self) -> None:
        self._spaces = in_namespaces(self.request.tools or ())

    def begin_in_background(self) -> bytes | None:
        """Return the immediate reply to a background request, and store its state; otherwise None."""
        if not self.request.background:
            return None
        self._kept(self._body("in_progress", []))
        return orjson.dumps(self._body("queued", []))

    def begin(self, index: int) -> bytes:
        return self._event("response.created", response=self._body("in_progress", [])) + self._event(
            "response.in_progress", response=self._body("in_progress", [])
        )

    def piece(
        self, index: int, parts: Sequence[AnswerPart], reason: str | None, details: PieceDetails = NO_DETAILS
    ) -> bytes:
        events = [self._part(part, details.logprobs) for part in parts]
        if reason is not None:
            self._reason = reason
            events.append(self._close())
        return b"".join(events)

    def end(self, usage: Usage, *, include_usage: bool) -> bytes:
        status = "incomplete" if self._reason == "length" else "completed"
        body = self._body(status, self._items, usage)
        self._kept(body)
        return self._event(f"response.{status}", response=body)

    def failed(self, error: KvasirError) -> bytes:
        body = {
            **self._body("failed", self._items),
            "error": {"code": _FAILED, "message": body_of(error)["error"]["message"]},
        }
        if self.request.background and not isinstance(error, UnavailableError):  # it may continue elsewhere
            self._kept(body)
        return self._event("response.failed", response=body)

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        (choice,) = choices
        message, self._reason = choice.message, choice.finish_reason
        parts: list[AnswerPart] = [Reasoning(message.reasoning)] if message.reasoning else []
        if message.content or not message.calls:
            parts.append(Content(message.content))
        for at, call in enumerate(message.calls):
            parts += [CallBegun(at, call.name), CallArguments(at, call.arguments)]
        for part in parts:
            self._part(part, choice.logprobs)
        self._close()
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        return self._kept(self._body(status, self._items, usage))

    def _kept(self, body: dict[str, Any]) -> bytes:
        written = orjson.dumps(body)
        if self.keep is not None:
            self.stored = self.keep(written, self._items)
        return written

    def _part(self, part: AnswerPart, logprobs: Any) -> bytes:
        if isinstance(part, Content):
            events = self._begin_item("message", {"role": "assistant", "content": [_output_text("")]})
            return events + self._say(part.text, logprobs)
        if isinstance(part, Reasoning):
            content = {"type": "reasoning_text", "text": ""}
            events = self._begin_item("reasoning", {"summary": [], "content": [content]})
            assert self._open is not None
            self._open["content"][0]["text"] += part.text
            return events + self._item_event(
                "response.reasoning_text.delta", content_index=0, delta=part.text
            )
        if isinstance(part, CallBegun):
            closed = self._close()
            call = {
                "call_id": f"call_{self.id.removeprefix('resp_')}_{part.index}",
                "name": part.name,
                "arguments": "",
                **self._spaces.get(part.name, {}),
            }
            return closed + self._begin_item("function_call", call)
        assert self._open is not None
        self._open["arguments"] += part.text
        return self._item_event("response.function_call_arguments.delta", delta=part.text)

    def _say(self, text: str, logprobs: Any) -> bytes:
        assert self._open is not None
        content = self._open["content"][0]
        content["text"] += text
        found = (logprobs or {}).get("content") or []
        content["logprobs"] += found
        return self._item_event("response.output_text.delta", content_index=0, delta=text, logprobs=found)

    def _begin_item(self, kind: str, fields: dict[str, Any]) -> bytes:
        """Begin an item unless one of that kind is open; each call has its own."""
        if self._open is not None and self._open["type"] == kind:
            return b""
        closed = self._close()
        name = f"{_PREFIXES[kind]}_{self.id.removeprefix('resp_')}_{len(self._items)}"
        self._open = {"id": name, "type": kind, "status": "in_progress", **fields}
        begun = {**self._open, "content": []} if "content" in self._open else self._open
        events = closed + self._event("response.output_item.added", output_index=len(self._items), item=begun)
        if kind == "message":
            part = _output_text("")
            events += self._item_event("response.content_part.added", content_index=0, part=part)
        return events

    def _close(self) -> bytes:
        item, events = self._open, b""
        if item is None:
            return b""
        if item["type"] == "message":
            part = item["content"][0]
            text, found = part["text"], part["logprobs"]
            events = self._item_event("response.output_text.done", content_index=0, text=text, logprobs=found)
            events += self._item_event("response.content_part.done", content_index=0, part=part)
        elif item["type"] == "reasoning":
            text = item["content"][0]["text"]
            events = self._item_event("response.reasoning_text.done", content_index=0, text=text)
        else:
            done = {"arguments": item["arguments"], "name": item["name"]}
            events = self._item_event("response.function_call_arguments.done", **done)
        item["status"] = "incomplete" if self._reason == "length" else "completed"
        events += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._open = None
        return events

    def _item_event(self, name: str, /, **fields: Any) -> bytes:
        assert self._open is not None
        return self._event(name, item_id=self._open["id"], output_index=len(self._items), **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        body = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"

    def _body(self, status: str, items: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        request = self.request
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": bool(request.background),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": {},
            "model": request.model,
            "output": items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_diagnostics": None,
            "reasoning": {"effort": (request.reasoning or {}).get("effort"), "summary": None},
            "service_tier": "default",
            "store": self.keep is not None,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": [_described(tool) for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            **({} if usage is None else {"usage": _usage(usage)}),
        }


def _described(tool: dict[str, Any]) -> dict[str, Any]:
    return {"parameters": None, "strict": None, "description": None, **tool}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def listed_items(name: str, items: Sequence[Mapping[str, Any]], wanted: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of the conversation up to the response `name`. `wanted` holds the query: `limit` (1 to
    100, default 20), `order` (`asc`, default `desc`) and `after`, an item's id. Raises InvalidRequest."""
    limit, order = wanted.get("limit", "20"), wanted.get("order", "desc")
    if not (limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= _MOST_LISTED):
        raise InvalidRequest(f"limit is from 1 to {_MOST_LISTED}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order is asc or desc", param="order")
    found = [_resource(name, item, at) for at, item in enumerate(items)]
    if order == "desc":
        found.reverse()
    if (after := wanted.get("after")) is not None:
        ids = [item["id"] for item in found]
        if after not in ids:
            raise InvalidRequest("after should be the id of an item", param="after")
        found = found[ids.index(after) + 1 :]
    page = found[: int(limit)]
    ends = [item["id"] for item in (page[:1] + page[-1:])] or ["", ""]
    head = {"object": "list", "data": page, "first_id": ends[0], "last_id": ends[1]}
    return {**head, "has_more": len(found) > len(page)}


def _resource(name: str, item: Mapping[str, Any], at: int) -> dict[str, Any]:
    kind = item.get("type", "message")
    own = f"{_PREFIXES.get(kind, 'item')}_{name.removeprefix('resp_')}_in{at}"
    found = {**item, "id": item.get("id") or own, "type": kind}
    if kind != "reasoning":
        found.setdefault("status", "completed")
    if kind == "message" and isinstance(text := item.get("content"), str):
        is_said = item.get("role") == "assistant"
        part = (
            {"type": "output_text", "annotations": [], "logprobs": []} if is_said else {"type": "input_text"}
        )
        found["content"] = [{**part, "text": text}]
    return found
