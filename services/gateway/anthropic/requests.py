"""Converts requests of Anthropic's Messages API to chats (`/v1/messages`, `/v1/messages/count_tokens`).
Fields without an equivalent are refused by name or have no effect."""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field

from services.gateway.errors import UnsupportedFeature, shown
from services.gateway.openai.fields import ECHOED, MESSAGES_IGNORED, Ignored, settle
from services.gateway.openai.schemas import MAX_STOPS, StopString, parse_chat, validated
from shared.errors import InvalidRequest

_TOOL_FIELDS = frozenset({"type", "name", "description", "input_schema"})
_LONG = re.compile(rb"-[0-9]{19}|[0-9]{20}")
"""In a body with integers beyond 64 bits, which the fast parser turns into doubles."""
_EFFORTS = {"low", "medium", "high"}


class MessagesRequest(BaseModel):
    """POST /v1/messages."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", protected_namespaces=())

    model: str
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
        except (ValueError, RecursionError):
            raise InvalidRequest("messages have a number of too many digits", param="messages") from None
    request = validated(MessagesRequest, content)
    settle(request, ignored, MESSAGES_IGNORED)
    if request.max_tokens is None and not counts:
        raise InvalidRequest("max_tokens: Field required", param="max_tokens")
    system = (
        [] if request.system is None else [{"role": "system", "content": _text(request.system, "system")}]
    )
    chat = {
        "model": request.model,
        "messages": [
            *system,
            *(
                each
                for at, message in enumerate(request.messages)
                for each in _messages(message, f"messages[{at}]")
            ),
        ],
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences or None,
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        **_tools(request, ignored),
        **_form(request, ignored),
    }
    for message in request.messages:
        ignored.others(message, ("role", "content"), "messages", ECHOED)
    last = chat["messages"][-1]
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
        tools.append(
            {"type": "function", "function": {**function, "description": tool.get("description", "")}}
        )
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
            arguments = json.dumps(block.get("input") or {})
            function = {"name": block.get("name"), "arguments": arguments}
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
