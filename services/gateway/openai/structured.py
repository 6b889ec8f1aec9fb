"""Structured output: turns `response_format`, `structured_outputs` and `guided_*` into one grammar. These are
OpenAI's and vLLM's fields. `forms/checks.py` checks the grammar."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from services.gateway.errors import UnsupportedFeature, shown
from services.gateway.forms.json_schemas import prepared
from shared.errors import InvalidRequest
from shared.grammars import json_grammar, lark_grammar, regex_grammar, written_grammar

MOST_CHOICES = 1024
_COMBINERS = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "not"})
_OF_OBJECTS = frozenset({"properties", "required", "additionalProperties", "patternProperties"})
_OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_OF_NUMBERS |= {"multipleOf", "enum", "const"}
LARGEST_NUMBER = 2**53 - 1
"""Last integer that every JSON reader keeps exactly. Without a bound a weak model writes digits endlessly."""
GrammarWriter = Callable[[Any, str], str]
"""Turns a field's value and path into a grammar. Raises InvalidRequest."""


def grammar_of(fields: Mapping[str, Any]) -> tuple[str, str]:
    """Return the request's grammar and the path of its field; both empty if there is none. Raises
    InvalidRequest for malformed or repeated requests, UnsupportedFeature for unknown kinds."""
    found: list[tuple[str, str]] = []
    if (response_format := fields.get("response_format")) is not None:
        found += _of_response_format(response_format)
    for name, write in GUIDED.items():
        if (value := fields.get(name)) is not None:
            found.append((write(value, name), name))
    if (outputs := fields.get("structured_outputs")) is not None:
        found += _of_structured_outputs(outputs)
    if len(found) > 1:
        text = f"{found[0][1]} and {found[1][1]} both say what form the answer has: send one"
        raise InvalidRequest(text, param=found[1][1])
    return found[0] if found else ("", "")


def _of_response_format(value: Any) -> list[tuple[str, str]]:
    path = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return []
    if kind == "json_object":
        return [(json_grammar({"type": "object"}), path)]
    if kind != "json_schema":
        text = (
            f"{path}.type {shown(repr(kind), 100)} is not supported: it is text, json_object or json_schema"
        )
        raise UnsupportedFeature(text, param=f"{path}.type")
    path += ".json_schema"
    described = value.get("json_schema")
    if not isinstance(described, dict):
        raise InvalidRequest(f"{path} should be an object with a schema", param=path)
    path += ".schema"
    return [(_of_schema(described.get("schema", {"type": "object"}), path), path)]


def _of_structured_outputs(value: Any) -> list[tuple[str, str]]:
    path, kinds = "structured_outputs", ", ".join(KINDS)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} should be an object", param=path)
    asked = {name: wanted for name, wanted in value.items() if wanted is not None and wanted is not False}
    for name in asked:
        if name not in KINDS:
            text = f"{path}.{shown(name, 100)} is not supported; there are {kinds}"
            raise UnsupportedFeature(text, param=path)
    if len(asked) != 1:
        raise InvalidRequest(f"{path} should have one of {kinds}", param=path)
    return [(KINDS[name](wanted, f"{path}.{name}"), f"{path}.{name}") for name, wanted in asked.items()]


def _of_schema(value: Any, path: str) -> str:
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"{path} is no JSON: {error}", param=path) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} should be a JSON schema, an object", param=path)
    return json_grammar(prepared(closed(value), path))


def _of_regex(value: Any, path: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{path} should be a regular expression", param=path)
    return regex_grammar(value)


def _of_choice(value: Any, path: str) -> str:
    is_list = isinstance(value, list) and 0 < len(value) <= MOST_CHOICES
    if not is_list or not all(isinstance(each, str) and each for each in value):
        raise InvalidRequest(f"{path} should be a list of 1 to {MOST_CHOICES} texts", param=path)
    return lark_grammar("start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in value))


def _of_grammar(value: Any, path: str) -> str:
    """Accepts Lark's syntax, and llama.cpp's GBNF, which begins with `root ::=`."""
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{path} should be a grammar in Lark's syntax or GBNF", param=path)
    return written_grammar(value)


def _of_any_object(value: Any, path: str) -> str:
    if value is not True:
        raise InvalidRequest(f"{path} should be true", param=path)
    return json_grammar({"type": "object"})


KINDS: Mapping[str, GrammarWriter] = {
    "json": _of_schema,
    "regex": _of_regex,
    "choice": _of_choice,
    "grammar": _of_grammar,
    "json_object": _of_any_object,
}
GUIDED: Mapping[str, GrammarWriter] = {f"guided_{kind}": write for kind, write in KINDS.items()}
"""The same kinds under their older names."""


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Close what the schema leaves open, unnamed properties and unbounded numbers, so that a model ends.
    Schemas that combine subschemas are unchanged. Raises InvalidRequest for nesting of hundreds of levels."""
    try:
        return schema if _combines(schema) else _closed(schema)
    except RecursionError:
        raise InvalidRequest("a JSON schema is nested too deeply") from None


def _combines(node: Any) -> bool:
    if isinstance(node, list):
        return any(map(_combines, node))
    if not isinstance(node, dict):
        return False
    combiners = _COMBINERS & node.keys()
    if "allOf" in combiners or len(combiners) > 1 or (combiners and _OF_OBJECTS & node.keys()):
        return True
    return any(map(_combines, node.values()))


def _closed(node: Any) -> Any:
    if isinstance(node, list):
        return [_closed(each) for each in node]
    if not isinstance(node, dict):
        return node
    done = {
        name: value if name in ("enum", "const", "default", "examples") else _closed(value)
        for name, value in node.items()
    }
    says_others = {"additionalProperties", "patternProperties", "minProperties"} & node.keys()
    if isinstance(node.get("properties"), dict) and "type" in node and node["properties"] and not says_others:
        required = node.get("required", [])
        if isinstance(required, list) and all(name in node["properties"] for name in required):
            done["additionalProperties"] = False
    if node.get("type") in ("integer", "number") and not _OF_NUMBERS & node.keys():
        done |= {"minimum": -LARGEST_NUMBER, "maximum": LARGEST_NUMBER}
    return done
