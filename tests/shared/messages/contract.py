"""What every message type has to satisfy, and values of any message type.

`msgpack` is the independent reader and writer: it knows nothing of our classes.
"""

import types
from typing import Any

import msgpack  # type: ignore[import-untyped]
import msgspec
import pytest
from hypothesis import strategies as st
from msgspec import inspect

from shared.blocks import HASH_BYTES
from shared.errors import InvalidMessage
from shared.messages.base import Message, decode, encode
from shared.messages.commands import PredictLength
from shared.messages.moves import PullBlocks
from shared.messages.prefixes import PrefixChain, WorkerPrefixes
from shared.messages.reports import SequenceFinished
from shared.messages.sequence import TOKEN_BYTES, Sampling, SequenceSpec
from shared.messages.shadows import AnswerSoFar, Shadow


def message_types(module: types.ModuleType) -> list[type[msgspec.Struct]]:
    """The structs that a module defines."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, msgspec.Struct)
        and value.__module__ == module.__name__
    ]


def values_of(message_type: type[Any]) -> st.SearchStrategy[Any]:
    """Any valid value of a struct, by its annotations."""
    return _strategy(inspect.type_info(message_type))


def _strategy(kind: inspect.Type) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.StructType():
            packed = _PACKED.get(kind.cls, {})
            fields = {}
            for field in kind.fields:
                item_bytes = packed.get(field.name)
                values = _strategy(field.type) if item_bytes is None else _packed(item_bytes)
                if item_bytes is not None and isinstance(field.type, inspect.VarTupleType):
                    values = st.lists(values, max_size=3).map(tuple)
                fields[field.name] = values if field.required else st.none() | values.map(_Given)
            if kind.cls is WorkerPrefixes:
                fields["added"] = st.just(_Given(bytes(HASH_BYTES)))
                fields["tiers"] = st.binary(min_size=1, max_size=1).map(_Given)
            return st.fixed_dictionaries(fields).map(lambda chosen: _build(kind.cls, chosen))
        case inspect.IntType():
            return st.integers(kind.ge, kind.le)
        case inspect.FloatType():
            return st.floats(kind.ge, kind.le, allow_nan=False)
        case inspect.StrType():
            if kind.pattern is not None:
                return st.from_regex(kind.pattern)
            return st.text(min_size=kind.min_length or 0, max_size=8)
        case inspect.BytesType():
            return st.binary(max_size=16)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.EnumType():
            return st.sampled_from(list(kind.cls))
        case inspect.VarTupleType():
            return st.lists(_strategy(kind.item_type), max_size=3).map(tuple)
        case inspect.TupleType():
            return st.tuples(*map(_strategy, kind.item_types))
        case inspect.DictType():
            return st.dictionaries(_strategy(kind.key_type), _strategy(kind.value_type), max_size=3)
        case inspect.AnyType():
            return st.integers(0, 9) | st.text(max_size=3)
        case inspect.UnionType():
            return st.one_of([_strategy(member) for member in kind.types])
    raise NotImplementedError(kind)


_PACKED: dict[type[Any], dict[str, int]] = {
    Sampling: {"forced": TOKEN_BYTES},
    SequenceSpec: {"prompt": TOKEN_BYTES, "generated": TOKEN_BYTES},
    PredictLength: {"prompt": TOKEN_BYTES},
    PullBlocks: {"tokens": TOKEN_BYTES},
    SequenceFinished: {"prompt": TOKEN_BYTES},
    PrefixChain: {"names": HASH_BYTES},
    WorkerPrefixes: {"removed": HASH_BYTES},
    Shadow: {"prompts": TOKEN_BYTES},
    AnswerSoFar: {"tokens": TOKEN_BYTES},
}
"""Bytes that are whole items: the message says so when it is made, its annotations cannot."""


def _packed(item_bytes: int) -> st.SearchStrategy[bytes]:
    item = st.binary(min_size=item_bytes, max_size=item_bytes)
    return st.lists(item, max_size=3).map(b"".join)


class _Given:
    """A value for a field that has a default; None leaves the default."""

    def __init__(self, value: object) -> None:
        self.value = value


def _build(cls: type[Any], chosen: dict[str, Any]) -> Any:
    given = {name: value.value if isinstance(value, _Given) else value for name, value in chosen.items()}
    required = {field.name for field in inspect.type_info(cls).fields if field.required}  # type: ignore[attr-defined]
    return cls(**{n: v for n, v in given.items() if n in required or isinstance(chosen[n], _Given)})


def check_round_trip(message: msgspec.Struct) -> None:
    """Decoding undoes encoding, and says the same to an independent reader."""
    data = encode(message)
    assert decode(data, type(message)) == message
    seen = msgpack.unpackb(data, strict_map_key=False)
    if isinstance(message, Message):
        assert isinstance(seen, dict) and decode(msgpack.packb(seen), type(message)) == message
        assert set(seen) <= set(message.__struct_fields__)
    else:
        assert isinstance(seen, list) and len(seen) == len(message.__struct_fields__)


def check_evolution(message: msgspec.Struct) -> None:
    """Unknown fields are ignored, fields with defaults may be absent, required ones may not."""
    kind = type(message)
    if not isinstance(message, Message):
        appended = [*msgpack.unpackb(encode(message)), "from the future", 7]
        assert decode(msgpack.packb(appended), kind) == message
        return
    seen: dict[str, Any] = msgpack.unpackb(encode(message), strict_map_key=False)
    assert decode(msgpack.packb({**seen, "from_the_future": {"x": [1]}}), kind) == message
    required = {field.name for field in inspect.type_info(kind).fields if field.required}  # type: ignore[attr-defined]
    sparse = decode(msgpack.packb({name: seen[name] for name in required}), kind)
    assert all(getattr(sparse, name) == getattr(message, name) for name in required)
    for name in required:
        with pytest.raises(InvalidMessage, match=f"missing required field `{name}`"):
            decode(msgpack.packb({other: seen[other] for other in seen if other != name}), kind)


def check_is_frozen(message: msgspec.Struct) -> None:
    for name in message.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(message, name, getattr(message, name))


def check_contract(message: msgspec.Struct) -> None:
    """All that holds for any message."""
    check_round_trip(message)
    check_evolution(message)
    check_is_frozen(message)
