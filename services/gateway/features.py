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
    "logprobs": lambda value: value is None or value is False,
    "top_logprobs": _is(0),
    "prompt_logprobs": _is_empty,
    "logit_bias": _is_empty,
    "presence_penalty": _is(0),
    "frequency_penalty": _is(0),
    "repetition_penalty": _is(1),
    "length_penalty": _is(1),
    "min_p": _is(0),
    "min_tokens": _is(0),
    "stop_token_ids": _is_empty,
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
            raise UnsupportedFeature(f"{name} is not supported by this server", param=name)


def unknown_fields(extra: Mapping[str, Any]) -> list[str]:
    """Names in `extra` that neither OpenAI's API nor this server knows."""
    return [name for name in extra if name not in UNSUPPORTED and name not in IGNORED]
