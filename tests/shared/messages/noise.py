"""Messages nobody should send: any value that a type allows, values it does not, bytes of no meaning.

From the annotations of the messages themselves, so that a new message or field is in it by itself. Seeded.
"""

import random
import types
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import inspect

ODD_INTS = (0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
ODD_FLOATS = (0.0, -0.0, -1.0, 1e9, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
ODD_TEXTS = ("", "a.b", "> *", "\0", "x" * 65, "é" * 300, "../../x", "_-")
ODD_BYTES = (b"", b"\0", b"\xff" * 3, bytes(4), bytes(16), bytes(range(256)))
ODD_THINGS: tuple[Any, ...] = (None, True, -1, 1.5, "x", b"x", [], {}, [[]], {"a": 1})
GARBAGE = (
    b"",
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xffab",
    b"\x81\xa2\xff\xff\x01",
    b"\x91" * 100_000 + b"\x01",
    b"\x81\xa1a" * 50_000 + b"\x01",
)
_USUAL_INTS = (1, 2, 3, 16, 64, 100)


class Noise:
    """`pools` are values that mean something to the reader, by the name of a field."""

    def __init__(self, seed: int, pools: Mapping[str, Sequence[Any]] = types.MappingProxyType({})) -> None:
        self._random = random.Random(seed)
        self._pools = pools

    def valid(self, message_type: type[Any]) -> Any:
        """MessagePack-able; within all bounds, but for what only the message itself can check."""
        return self._value(inspect.type_info(message_type), "")

    def payload(self, message_type: type[Any]) -> bytes:
        """Valid, changed somewhere, cut off, or nothing at all."""
        kind = self._random.random()
        if kind < 0.08:
            return self._random.choice(GARBAGE)
        value = self.valid(message_type)
        for _ in range(self._random.choice((0, 1, 1, 2, 4)) if kind < 0.6 else 0):
            value = self._changed(value)
        data = msgspec.msgpack.encode(value)
        return data[: self._random.randrange(len(data) + 1)] if kind < 0.15 else data

    def _value(self, kind: inspect.Type, name: str) -> Any:
        pick = self._random.choice
        if name in self._pools and self._random.random() < 0.75:
            return pick(self._pools[name])
        match kind:
            case inspect.StructType():
                fields = [
                    (field.encode_name, self._value(field.type, field.name))
                    for field in kind.fields
                    if field.required or kind.array_like or self._random.random() < 0.6
                ]
                return [value for _, value in fields] if kind.array_like else dict(fields)
            case inspect.IntType(ge=low, le=high):
                odd = [number for number in ODD_INTS if (low or 0) <= number <= (high or 0)]
                return pick(_USUAL_INTS if self._random.random() < 0.7 else (*odd, low, high))
            case inspect.FloatType(ge=low, le=high):
                return pick((low or 0.0, high or 0.0, 0.0, min(high or 0.0, self._random.random())))
            case inspect.StrType(pattern=None):
                return pick(("x", "x" * (kind.min_length or 1), "y" * (kind.max_length or 1), "\0"))
            case inspect.StrType():
                return pick(("worker-9", "gateway-9", "x" * 64, "_"))
            case inspect.BytesType():
                return self._random.randbytes(pick((0, 4, 16, 64)))
            case inspect.BoolType():
                return self._random.random() < 0.5
            case inspect.EnumType():
                return pick(list(kind.cls)).value
            case inspect.VarTupleType():
                return [self._value(kind.item_type, name) for _ in range(pick((0, 1, 1, 2, 5)))]
            case inspect.TupleType():
                return [self._value(item, "") for item in kind.item_types]
            case inspect.DictType():
                keys = (self._value(kind.key_type, "worker_id") for _ in range(pick((0, 1, 3))))
                return {key: self._value(kind.value_type, "") for key in keys}
            case inspect.UnionType():
                return self._value(pick(kind.types), name)
            case inspect.NoneType():
                return None
            case inspect.AnyType():
                return pick(ODD_THINGS)
        raise NotImplementedError(kind)

    def _changed(self, value: Any) -> Any:
        """With one change somewhere inside."""
        pick = self._random.choice
        is_inside = self._random.random() < 0.8
        if isinstance(value, dict) and value and is_inside:
            key, change = pick(list(value)), self._random.random()
            if change < 0.1:
                return {other: value[other] for other in value if other != key}
            return {**value, key: self._changed(value[key])}
        if isinstance(value, list) and value and is_inside:
            at, change = self._random.randrange(len(value)), self._random.random()
            if change < 0.15:
                return value[:at] + value[at + 1 :]
            if change < 0.25:
                return value + [value[at]] * pick((1, 50, 1000))
            return [*value[:at], self._changed(value[at]), *value[at + 1 :]]
        if self._random.random() < 0.15:
            return pick(ODD_THINGS)
        match value:
            case bool():
                return not value
            case int():
                return pick(ODD_INTS)
            case float():
                return pick(ODD_FLOATS)
            case str():
                return pick(ODD_TEXTS)
            case bytes():
                return pick((*ODD_BYTES, value + b"\0", value[:-1], value * 50))
        return pick(ODD_THINGS)
