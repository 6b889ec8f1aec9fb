"""What clients may ask for that this server does not do: refused by name, unless the value asks for nothing.

Knows field names and neutral values; not what they would mean.
"""

from collections.abc import Callable, Mapping
from typing import Any

from services.gateway.errors import UnsupportedFeature

Neutral = Callable[[Any], bool]


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value in ("", "none", [], {})


def _is(*values: Any) -> Neutral:
    return lambda value: value is None or value in values


def _is_text_format(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and value.get("type") == "text")


UNSUPPORTED: Mapping[str, Neutral] = {
    "tools": _is_empty,
    "tool_choice": _is("none", "auto"),
    "functions": _is_empty,
    "function_call": _is("none", "auto"),
    "response_format": _is_text_format,
    "top_logprobs": _is(0),  # of completions; chats have it
    "prompt_logprobs": _is_empty,
    "logit_bias": _is_empty,
    "length_penalty": _is(1),
    "audio": _is_empty,
    "modalities": lambda value: value is None or value == ["text"],
    "web_search_options": _is_empty,
    "suffix": _is_empty,
    "echo": _is_empty,
    "use_beam_search": _is_empty,
    "continue_final_message": _is_empty,
    "add_generation_prompt": _is(True),
    "guided_json": _is_empty,
    "guided_regex": _is_empty,
    "guided_choice": _is_empty,
    "guided_grammar": _is_empty,
    "structured_outputs": _is_empty,
}

INSTEAD: Mapping[str, str] = {
    "tools": "describe the functions in a system message, ask for a call as JSON, and parse the answer",
    "tool_choice": "it goes with tools, which are not supported either; send none or auto, or leave it out",
    "functions": "describe them in a system message, ask for a call as JSON, and parse the answer",
    "response_format": 'ask for JSON in the prompt and check the answer; {"type": "text"} is taken',
    "guided_json": "ask for JSON in the prompt and check the answer",
    "structured_outputs": "ask for the form in the prompt and check the answer",
    "top_logprobs": "here the number goes into logprobs, from 0 to 5",
    "prompt_logprobs": "logprobs gives those of the answer",
}
"""What to do about a refusal, where something can be done."""

IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "moderation", "prediction"}
    | {"prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}
    | {"reasoning_effort", "verbosity", "parallel_tool_calls"}
)
"""Hints and bookkeeping of OpenAI's own service: accepted without effect."""


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Raises UnsupportedFeature naming the first field that asks for something this server does not do."""
    for name, is_neutral in UNSUPPORTED.items():
        if name in fields and not is_neutral(fields[name]):
            advice = f": {INSTEAD[name]}" if name in INSTEAD else "; leave it out"
            raise UnsupportedFeature(f"{name} is not supported by this server{advice}", param=name)


def unknown_fields(extra: Mapping[str, Any]) -> list[str]:
    """Names in `extra` that neither OpenAI's API nor this server knows."""
    return [name for name in extra if name not in UNSUPPORTED and name not in IGNORED]
