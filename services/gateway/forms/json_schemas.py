"""Rewrites JSON schemas for the grammar library, or refuses what it would get wrong. The library uses doubles
and 64-bit integers and loses digits silently. Bounds are therefore narrowed to exact values, and constants
that would change are refused. Unknown `format` values are annotations."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from math import inf, nextafter
from typing import Any, TypeGuard

from services.gateway.errors import shown
from shared.errors import InvalidRequest

Schema = Mapping[str, Any]
EXACT = 2**53
"""Largest range in which a double holds every integer."""
LARGEST = 2**63 - 1024
"""Largest double below 2**63; beyond it the library's integers overflow."""
_FAR = 10**17
"""A bound beyond this needs one on the other side."""
_SMALLEST = Fraction(1, 10**50)
"""Bounds nearer to 0 are narrowed: each digit is a level of nesting."""
_MOST_MULTIPLE = 1024
"""The library needs a state per remainder."""
_OUT_OF_REACH = 10**7
"""No answer is this long, so a `maxLength` or `maxItems` from here on has no effect."""
_REPEATED = re.compile(r"(?<!\\)\{0*[1-9][0-9]{6}")
"""A minimum repetition beyond any answer: the library would stop in the middle."""
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
_MOST_CHARS = {"email": 64, "uri": 128, "hostname": 64, "date-time": 40, "time": 32, "duration": 32}
"""For formats without a limit, which a weak model may never end."""
_MAPS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
"""Definitions come first, so that an error is reported there and not at its use."""
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SCHEMAS = ("items", "additionalProperties", "unevaluatedItems", "if", "then", "else", "contains")


def prepared(schema: Schema, path: str) -> dict[str, Any]:
    """Return the schema for the library. Raises InvalidRequest naming `path`."""
    try:
        return _prepared(schema, "")
    except _Refused as refused:
        where = f" at {shown(refused.where, 200)}" if refused.where else ""
        raise InvalidRequest(f"{path} is not supported{where}: {refused.reason}", param=path) from None
    except RecursionError:
        raise InvalidRequest(f"{path} is nested too deeply", param=path) from None


def parts(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield the subschemas with their locations: `properties.name`, `anyOf[0]`."""
    for name in _MAPS:
        if isinstance(schema.get(name), dict):
            yield from (
                (f"{name}.{key}", part) for key, part in schema[name].items() if isinstance(part, dict)
            )
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            yield from (
                (f"{name}[{at}]", part) for at, part in enumerate(schema[name]) if isinstance(part, dict)
            )
    yield from ((name, schema[name]) for name in _SCHEMAS if isinstance(schema.get(name), dict))


class _Refused(Exception):
    def __init__(self, where: str, reason: str) -> None:
        self.where, self.reason = where, reason


def _prepared(schema: Schema, where: str) -> dict[str, Any]:
    done = dict(schema)
    _mend_format(done)
    for name in ("minLength", "minItems", "minProperties"):
        if _is_number(done.get(name)) and done[name] >= _OUT_OF_REACH:
            raise _Refused(_at(where, name), f"no answer is so long: {name} is below {_OUT_OF_REACH}")
    pattern = done.get("pattern")
    if isinstance(pattern, str) and _REPEATED.search(pattern) is not None:
        raise _Refused(_at(where, "pattern"), "no answer is so long: repeat a million times at most")
    for name in ("maxLength", "maxItems", "maxProperties"):
        if isinstance(done.get(name), int) and done[name] >= _OUT_OF_REACH:
            del done[name]
    if done.get("uniqueItems") is False:
        del done["uniqueItems"]
    _mend_bounds(done, where)
    _check_multiple(done.get("multipleOf"), where)
    for name in ("const", "enum"):
        if name in done:
            _check_constants(done[name], _at(where, name))
    for name in _MAPS:
        if isinstance(done.get(name), dict):
            done[name] = {key: _part(each, _at(where, f"{name}.{key}")) for key, each in done[name].items()}
    for name in _LISTS:
        if isinstance(done.get(name), list):
            done[name] = [_part(each, _at(where, f"{name}[{at}]")) for at, each in enumerate(done[name])]
    for name in _SCHEMAS:
        done |= {name: _part(done[name], _at(where, name))} if name in done else {}
    return done


def _part(part: Any, where: str) -> Any:
    return _prepared(part, where) if isinstance(part, dict) else part


def _at(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _mend_format(done: dict[str, Any]) -> None:
    form = done.get("format")
    if isinstance(form, str) and form not in _FORMATS:
        del done["format"]
    most = _MOST_CHARS.get(form) if isinstance(form, str) else None
    least = done.get("minLength", 0)
    if most is not None and "maxLength" not in done and isinstance(least, int) and least <= most:
        done["maxLength"] = most


def _mend_bounds(done: dict[str, Any], where: str) -> None:
    """Move bounds that are not doubles to the next one inside; make exclusive ones inclusive."""
    for side, exclusive, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        is_old = done.get(exclusive) is True  # draft 4: `minimum` itself is exclusive
        for name in (side, exclusive):
            value = done.get(name)
            if not _is_number(value) or not (abs(value) >= EXACT or 0 < abs(value) < _SMALLEST):
                continue
            if sign * value > LARGEST:
                reason = f"no answer is beyond ±{LARGEST}, so {name} {_written(value)} leaves none"
                raise _Refused(_at(where, name), f"{reason}: write such a number as a string of digits")
            is_text = done.get("type") != "integer"
            inner = _inner(value, sign, is_exclusive=is_old or name == exclusive, is_text=is_text)
            del done[name]
            done.pop(exclusive if is_old else "", None)
            other = done.get(side)
            done[side] = max(inner, other, key=lambda each: sign * each) if _is_number(other) else inner
    least, most = done.get("minimum"), done.get("maximum")
    if _is_number(least) and least > _FAR and not _is_number(most):
        done["maximum"] = most = LARGEST
    if _is_number(most) and most < -_FAR and not _is_number(least):
        done["minimum"] = least = -LARGEST
    if _is_number(least) and _is_number(most) and least > most and max(abs(least), abs(most)) >= EXACT:
        reason = "there is no number between the bounds that a double has: write it as a string of digits"
        raise _Refused(_at(where, "minimum"), reason)


def _inner(value: Any, sign: int, *, is_exclusive: bool, is_text: bool) -> int | float:
    """Return the bound, or the next double on its allowed side; `is_text`: by its shortest text, too."""
    if abs(value) < 1:
        return sign * float(_SMALLEST) if sign * value > 0 else 0
    if sign * value < -LARGEST:
        return -sign * LARGEST
    found = float(value)
    if sign * found < sign * value or is_exclusive:
        found = nextafter(found, sign * inf)
    while is_text and sign * Fraction(repr(found)) < sign * value:
        found = nextafter(found, sign * inf)
    if sign * found > LARGEST:
        return sign * LARGEST + sign  # no value is inside
    return int(found)


def _check_multiple(value: Any, where: str) -> None:
    if not _is_number(value):
        return
    digits = abs(value)
    while digits % 1 and digits <= _MOST_MULTIPLE:  # as the library does, in doubles
        digits *= 10
    if not 0 < digits <= _MOST_MULTIPLE:
        reason = f"multipleOf {_written(value)} has too many steps: at most {_MOST_MULTIPLE}, or three digits"
        raise _Refused(_at(where, "multipleOf"), f"{reason}; leave it out and check the answer")


def _check_constants(value: Any, where: str) -> None:
    if isinstance(value, list):
        for at, each in enumerate(value):
            _check_constants(each, f"{where}[{at}]")
    elif isinstance(value, dict):
        for name, each in value.items():
            _check_constants(each, _at(where, name))
    elif _is_number(value) and (abs(value) > LARGEST or value != float(value)):
        reason = f"{_written(value)} would lose digits: integers are kept up to ±{EXACT}"
        raise _Refused(where, f"{reason}, and beyond that those that a double has; write it as a string")


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _written(value: Any) -> str:
    return shown(json.dumps(value), 40)


_INSTEAD = {
    "not": "say what it may be, with enum or anyOf",
    "if": "write anyOf with a branch for each case",
    "then": "write anyOf with a branch for each case",
    "else": "write anyOf with a branch for each case",
    "contains": "say with items what all items are",
    "minContains": "say with items what all items are",
    "maxContains": "say with items what all items are",
    "uniqueItems": "leave it out and check the answer",
    "propertyNames": "name the properties, or use patternProperties",
    "dependencies": "write anyOf with a branch for each case",
    "dependentRequired": "write anyOf with a branch for each case",
    "dependentSchemas": "write anyOf with a branch for each case",
    "unevaluatedItems": "use items",
    "unevaluatedProperties": "use additionalProperties",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}
_SMALLER = "make its bounds, repetitions and alternatives smaller"


def _of_keywords(found: re.Match[str]) -> str:
    names = re.findall(r'"((?:[^"\\]|\\.)*)"', found[1])
    advice = dict.fromkeys(_INSTEAD[name] for name in names if name in _INSTEAD)
    return f"{', '.join(names)} is not supported: " + ("; ".join(advice) or "leave it out")


_SAID: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"Unimplemented keys: \[(.*?)\]", _of_keywords),
    ("NoExtensionBias", "its $ref leads back to itself: put something in between"),
    (r"circular references.*", "a $ref to itself stands beside other keywords: put these into what it names"),
    (r"Resource '(.*?)' is not present", r"$ref \1: nothing is fetched, put the definition under $defs"),
    (r"Pointer '(.*?)' does not exist", r"$ref: there is nothing at \1, define it there"),
    (r"Failed to generate regex for .* range", f"minimum and maximum are too large: stay within ±{_FAR}"),
    (r"oneOf constraints are not supported", "the branches of oneOf may overlap: use anyOf"),
    (r"Unsatisfiable schema: Regex is empty", "pattern, format and lengths allow no text together"),
    (r"Unsatisfiable schema: (.*?)(?:\n|$)", r"no answer fits: \1"),
    (r"Unable to determine if regex is empty", f"pattern, format and lengths are too large: {_SMALLER}"),
    (r"error: decimal literal invalid", "a length is too large: leave it out"),
    (r"(?s)regex parse error.*?\n *(\S.*?)\n.*error: (.*)", r"the pattern \1 is not supported: \2"),
    (r"error: (look-around|backreferences)[^\n]*", r"\1 in a pattern is not supported: leave it out"),
    (r"(?i)(too many|too large|fuel|limit exceeded|states)[^\n]*", f"the form is too large: {_SMALLER}"),
)


def explained(reason: str) -> str:
    """Return the library's reason as a sentence with advice, without the grammar's text."""
    for pattern, said in _SAID:
        found = re.search(pattern, reason)
        if found is not None:
            return shown(said(found) if callable(said) else found.expand(said), 300)
    return shown(reason.partition("\n")[0], 300)
