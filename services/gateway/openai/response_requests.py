"""Converts requests of OpenAI's Responses API to chats; earlier turns may come from the store."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from services.gateway.errors import UnsupportedFeature, shown
from services.gateway.openai.fields import RESPONSES_IGNORED, Ignored, settle
from services.gateway.openai.schemas import MAX_ENTRIES, parse_object, validated
from services.gateway.openai.tools import full_name
from shared.errors import InvalidRequest

_STATE = {"conversation": "send the whole conversation as input", "prompt": "send the text itself"}
_ROLES = ("user", "assistant", "system", "developer")
_ITEM_FIELDS = frozenset(
    {"type", "id", "status", "role", "content", "call_id", "namespace", "name", "arguments", "output"}
    | {"summary", "phase"}
)
_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")


class ResponseRequest(BaseModel):
    """POST /v1/responses."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", protected_namespaces=())

    model: str
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
    where = "gateway.stored_responses names no file"
    if request.store:
        text = f"store is not supported by this server ({where}): leave it out"
        raise UnsupportedFeature(text, param="store")
    if request.background:
        text = f"background is not supported by this server ({where}): leave it out, and stream"
        raise UnsupportedFeature(text, param="background")
    if request.previous_response_id is not None:
        text = f"previous_response_id is not supported by this server ({where})"
        raise UnsupportedFeature(
            f"{text}: send the whole conversation as input", param="previous_response_id"
        )


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
