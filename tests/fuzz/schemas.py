"""Requests for answers in forms that are drawn to trip the grammar library: numbers at all borders, depths,
references, unicode, repetitions; on every surface that takes a form."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

NUMBERS = [0, -0.0, 1, -1, 0.1, 1 / 3, 1.5, 5e-324, 1e-308, 1e16, 1e308, -1e308, 10**18, 10**30, -(10**30)]
NUMBERS += [sign * (2**bits + off) for bits in (31, 32, 53, 63, 64) for off in (-1, 0, 1) for sign in (1, -1)]
COUNTS = [-1, 0, 1, 2, 10, 256, 65_536, 10**6, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 10**19, 1.5]
TEXTS = ["", "a", "b", "\x00", "é", "漢", "😀", "\u202e", "\ud7ff", "\\", '"', "\n", "^", "{}"]
TEXTS += ["\u0300" * 40, "a" * 300]
PATTERNS = r"^a*$ (a|b)* [^\x00] \p{L}+ ^.{0,100000}$ (a{1,1000}){1,100} a{0} () []".split()
PATTERNS += ["(?i)ab", "^(?=a)", "\\b", "\\1", "|", ".*.*.*.*b", "[\\u0000-\\uffff]+", "(((a?)?)?)*"]
PATTERNS += ["\\S{2147483648}", "x{4294967295}", "(a{1000}){1000}", "\\d{3,}", "a||b", "(a", "\\u{1F600}"]
FORMATS = ["date", "date-time", "time", "uuid", "email", "uri", "ipv4", "ipv6", "path", "regex", 1]
REFERENCES = [
    "#",
    "#/",
    "#/$defs/a",
    "#/$defs/b",
    "#/$defs/%61",
    "#/properties/a",
    "#/nope",
    "http://x/y",
    "#a",
    "",
]
REFUSED = ["not", "if", "contains", "propertyNames", "dependentSchemas", "unevaluatedProperties"]


def schema_of(draw: Random, depth: int = 0) -> Any:
    """Of at most some six levels."""

    def inner() -> Any:
        return schema_of(draw, depth + 1)

    def some(names: tuple[str, ...], values: list[Any], share: float) -> dict[str, Any]:
        return {name: draw.choice(values) for name in names if draw.random() < share}

    limits = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    flat: list[Callable[[], Any]] = [
        lambda: {"type": draw.choice(["integer", "number"]), **some(limits, NUMBERS, 0.4)},
        lambda: {
            "type": "string",
            **some(("minLength", "maxLength"), COUNTS, 0.4),
            **some(("pattern",), PATTERNS, 0.4),
            **some(("format",), FORMATS, 0.2),
        },
        lambda: {"const": _constant(draw)},
        lambda: {"enum": [_constant(draw) for _ in range(draw.randrange(5))]},
        lambda: {"$ref": draw.choice(REFERENCES)},
        lambda: draw.choice(
            [True, False, {}, {"type": ["null", "integer"]}, {"type": "foo"}, {"type": []}, 3]
        ),
    ]
    deep: list[Callable[[], Any]] = [
        lambda: {
            "type": "array",
            "items": inner(),
            **some(("minItems", "maxItems"), COUNTS, 0.4),
            **({"prefixItems": [inner() for _ in range(draw.randrange(3))]} if draw.random() < 0.2 else {}),
            **some(("uniqueItems",), [True, False], 0.1),
        },
        lambda: {
            "type": "object",
            "properties": {draw.choice(TEXTS): inner() for _ in range(draw.randrange(4))},
            **some(("required",), [["a"], ["b", "é"], ["zz"], []], 0.4),
            **({"additionalProperties": inner()} if draw.random() < 0.3 else {}),
            **({"patternProperties": {draw.choice(PATTERNS): inner()}} if draw.random() < 0.2 else {}),
            **some(("minProperties", "maxProperties"), COUNTS, 0.1),
        },
        lambda: {draw.choice(["anyOf", "oneOf", "allOf"]): [inner() for _ in range(draw.randrange(4))]},
        lambda: {draw.choice(REFUSED): inner()} if draw.random() < 0.3 else {"anyOf": [inner(), inner()]},
    ]
    return draw.choice(flat if depth > 4 else flat + deep + deep)()


def _constant(draw: Random) -> Any:
    number, text = draw.choice(NUMBERS), draw.choice(TEXTS)
    return draw.choice([number, number, text, None, True, [number], {text: number}, [], {}])


def request_of(seed: int, model: str) -> tuple[str, bytes]:
    """The path and body of one request; the same ones for a seed, always."""
    draw = Random(seed)
    schema = schema_of(draw)
    if isinstance(schema, dict) and draw.random() < 0.4:
        loop = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}
        schema = {**schema, "$defs": {"a": schema_of(draw, 2), "b": loop}}
    if draw.random() < 0.05:
        for _ in range(draw.choice([20, 60, 200, 500])):
            schema = {"type": "array", "items": schema} if draw.random() < 0.9 else {"anyOf": [schema]}
    messages = [{"role": "user", "content": "x"}]
    chat = {"model": model, "max_tokens": draw.choice([2, 8, 24]), "messages": messages}
    named = {"name": "f", "parameters": schema}
    kind = draw.randrange(8)
    if kind == 0:
        tools = [{"type": "function", "function": named}]
        return "/v1/chat/completions", _body(chat, tools=tools, tool_choice="required")
    if kind == 1:
        tools = [{"name": "f", "input_schema": schema}]
        return "/v1/messages", _body(chat, tools=tools, tool_choice={"type": "any"})
    if kind == 2:
        form = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        return "/v1/responses", _body({"model": model, "input": "x", "max_output_tokens": 8}, text=form)
    if kind == 3:
        return "/v1/chat/completions", _body(chat, guided_regex=draw.choice(PATTERNS) + draw.choice(PATTERNS))
    if kind == 4:
        rules = "".join(f"{draw.choice(['a', 'b', 'root'])} ::= {_rule(draw)}\n" for _ in range(3))
        return "/v1/chat/completions", _body(chat, guided_grammar=f"root ::= {_rule(draw)}\n{rules}")
    whole = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return "/v1/chat/completions", _body(chat, response_format=whole)


def _rule(draw: Random) -> str:
    parts = ['"a"', "a", "b", "[a-z]", "[^\\x00]", "root", "( a )", '""', "|", "[", "é"]
    return " ".join(draw.choice(parts) + draw.choice(["", "", "*", "+", "?", "{2,100000}"]) for _ in range(3))


def _body(fields: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({**fields, **more}).encode()
