"""`tools` and `tool_choice` of a request, and calls and results in the chat history. Templates receive what
transformers passes: calls with arguments as objects. If the template does not support functions, a system
message describes them, and calls and results become text."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

from services.gateway.errors import shown
from services.gateway.openai.structured import closed
from services.gateway.parts.formats import Function
from services.gateway.text.tokenizer import Codec
from shared.errors import InvalidRequest

if TYPE_CHECKING:
    from services.gateway.openai.fields import Ignored

MOST_TOOLS = 128
MOST_NAME_CHARS = 256
"""OpenAI allows 64 characters, Anthropic 128; a namespace prefix is added."""
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MOST_NAME_CHARS}}}")
_FUNCTION_FIELDS = frozenset({"name", "description", "parameters", "strict"})
_WITHOUT_EFFECT = frozenset({"cache_control", "defer_loading", "output_schema", "allowed_callers"})
ToolMode = Literal["none", "auto", "required"]
TemplateMessage = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions that an answer may or must call."""

    functions: tuple[Function, ...] = ()
    described: tuple[Mapping[str, Any], ...] = ()
    """As in the request, for the template."""
    mode: ToolMode = "none"
    is_parallel: bool = True


def tools_of(tools: Any, choice: Any, parallel: Any, ignored: "Ignored") -> Tools:
    """Return the functions among `tools`; other tools go to `ignored`. Raises InvalidRequest and
    UnsupportedFeature naming the field."""
    if tools and not isinstance(tools, list):
        raise InvalidRequest("tools should be a list", param="tools")
    found = dict(_flat(tools or (), "tools", ignored))
    if not found:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice goes with tools only", param="tool_choice")
        return Tools()
    if len(found) > MOST_TOOLS:
        raise InvalidRequest(f"tools should be at most {MOST_TOOLS} functions", param="tools")
    functions = [_function(tool, path) for path, tool in found.items()]
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise InvalidRequest("two tools have one name", param="tools")
    mode, wanted = _choice(choice)
    unknown = next((name for name in wanted if name not in names), None)
    if unknown is not None:
        raise InvalidRequest(
            f"tool_choice names {shown(unknown, 100)!r}, which is no tool", param="tool_choice"
        )
    if mode == "none":
        return Tools()
    kept = tuple(function for function in functions if not wanted or function.name in wanted)
    is_named = isinstance(choice, dict) and choice.get("type") == "function"
    return Tools(kept, tuple(map(_described, found.values())), mode, parallel is not False and not is_named)


def full_name(namespace: Any, name: Any) -> Any:
    """Return the model's name for a namespaced function; without a namespace, `name` itself."""
    if not isinstance(namespace, str) or not namespace or not isinstance(name, str):
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _flat(
    tools: Sequence[Any], path: str, ignored: "Ignored", namespace: Any = None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the functions with their paths, namespaced ones under their full names."""
    for at, tool in enumerate(tools):
        where = f"{path}[{at}]"
        if not isinstance(tool, dict):
            raise InvalidRequest(f"{where} should be an object", param=where)
        kind = tool.get("type", "function")
        inner, described = tool.get("tools"), tool.get("function")
        if kind == "namespace" and namespace is None and isinstance(inner, list):
            yield from _flat(inner, f"{where}.tools", ignored, tool.get("name"))
        elif kind != "function":
            ignored.tool(kind, where)
        elif isinstance(described, dict):
            ignored.others(tool, ("type", "function"), "tools", ("cache_control",))
            ignored.others(described, _FUNCTION_FIELDS, "tools", _WITHOUT_EFFECT)
            function = {**described, "name": full_name(namespace, described.get("name"))}
            yield where, {**tool, "function": function}
        else:
            yield where, tool


def _function(tool: Mapping[str, Any], path: str) -> Function:
    described = tool.get("function")
    if not isinstance(described, dict):
        raise InvalidRequest(f"{path}.function should be an object", param=f"{path}.function")
    name = described.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        text = f"{path}.function.name should be 1 to {MOST_NAME_CHARS} letters, digits, '_', '-' and '.'"
        raise InvalidRequest(text, param=f"{path}.function.name")
    parameters = described.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        where = f"{path}.function.parameters"
        raise InvalidRequest(f"{where} should be a JSON schema, an object", param=where)
    description = described.get("description")
    said = description if isinstance(description, str) else ""
    return Function(name, said, _arguments(parameters or {}), path)


def _arguments(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    if not parameters.get("properties") and not {"$ref", "anyOf", "allOf", "oneOf"} & parameters.keys():
        others = parameters.get("additionalProperties") or False
        return {**parameters, "type": "object", "additionalProperties": others}
    return closed({"type": "object", **parameters})


def _described(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = {"description": "", "parameters": {"type": "object", "properties": {}}, **tool["function"]}
    function.pop("strict", None)
    return {"type": "function", "function": function}


def _choice(choice: Any) -> tuple[ToolMode, Sequence[str]]:
    """Return the mode and the chosen functions; empty: all."""
    if choice in (None, "auto"):
        return "auto", ()
    if choice in ("none", "required"):
        return choice, ()
    if isinstance(choice, dict):
        if choice.get("type") == "function" and isinstance(choice.get("function"), dict):
            return "required", (str(choice["function"].get("name")),)
        if choice.get("type") == "allowed_tools" and isinstance(choice.get("allowed_tools"), dict):
            allowed = choice["allowed_tools"]
            tools = [tool for tool in allowed.get("tools") or () if isinstance(tool, dict)]
            names = [str((tool.get("function") or tool).get("name")) for tool in tools]
            return ("required" if allowed.get("mode") == "required" else "auto"), names
    text = 'tool_choice is none, auto, required or {"type": "function", "function": {"name": …}}'
    raise InvalidRequest(text, param="tool_choice")


def template_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    """Return a message's `tool_calls` for templates. Raises InvalidRequest."""
    if not isinstance(calls, list):
        raise InvalidRequest(f"{path} should be a list", param=path)
    return [_template_call(call, f"{path}[{at}]") for at, call in enumerate(calls)]


def _template_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{path} should have a function with a name", param=path)
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            arguments = {"arguments": arguments}  # the model's invalid JSON is shown to it again
    return {
        "id": str(call.get("id") or "call_0"),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def for_template(
    codec: Codec, messages: Sequence[TemplateMessage], tools: Tools
) -> tuple[Sequence[TemplateMessage], Sequence[Mapping[str, Any]]]:
    """Return messages and functions as the model's template handles them."""
    if not codec.chat_template.knows_functions:
        return in_words(messages, tools), ()
    is_mistral = codec.call_format.name.startswith("mistral")
    return with_short_ids(messages) if is_mistral else messages, tools.described


def with_short_ids(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Shorten call ids to nine letters and digits, as Mistral's templates require."""
    shortened = []
    for message in messages:
        short = dict(message)
        if "tool_call_id" in message:
            short["tool_call_id"] = _short(message["tool_call_id"])
        if "tool_calls" in message:
            short["tool_calls"] = [{**call, "id": _short(call["id"])} for call in message["tool_calls"]]
        shortened.append(short)
    return shortened


def _short(call_id: str) -> str:
    is_short = re.fullmatch("[A-Za-z0-9]{9}", call_id) is not None
    return call_id if is_short else blake2b(call_id.encode(), digest_size=5).hexdigest()[:9]


def in_words(messages: Sequence[TemplateMessage], tools: Tools) -> list[TemplateMessage]:
    """Describe functions, calls and results as text, for templates that do not support them."""
    said = [_in_words(message) for message in messages]
    if tools.mode == "none":
        return said
    about = _PREAMBLE.format(tools="\n".join(json.dumps(tool) for tool in tools.described))
    if said and said[0]["role"] == "system":
        return [{**said[0], "content": f"{said[0]['content']}\n\n{about}"}, *said[1:]]
    return [{"role": "system", "content": about}, *said]


_PREAMBLE = (
    "You may call functions to help the user. They are described here, one a line:\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call one, answer with its name and arguments as JSON between two tags, and nothing else:\n"
    '<tool_call>\n{{"name": "…", "arguments": {{…}}}}\n</tool_call>'
)


def _in_words(message: TemplateMessage) -> TemplateMessage:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>" for call in calls]
    content = "\n".join([*([message["content"]] if message["content"] else []), *written])
    return {"role": message["role"], "content": content}
