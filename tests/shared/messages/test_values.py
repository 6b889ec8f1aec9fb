"""Whatever a message carries is checked when it is decoded: no reader meets an id that is no subject token, a
count that is negative or huge, or a time that is no number.

Keeps from coming back: one heartbeat of a worker "a.b" that ended every process it reached, epochs of
2^64 - 1 that no later scheduler could exceed, block sizes of 0.
"""

import importlib
import math
import pkgutil
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from shared import messages, subjects
from shared.errors import InvalidMessage
from shared.messages.base import decode, encode
from shared.messages.values import Count, Epoch, Id, Number, OptionalId, Seconds
from tests.shared.messages.contract import message_types, values_of
from tests.shared.messages.noise import GARBAGE, Noise

ALL = [
    kind
    for found in pkgutil.iter_modules(messages.__path__)
    for kind in message_types(importlib.import_module(f"shared.messages.{found.name}"))
    if kind.__name__ != "Message"
]


def leaves(kind: inspect.Type, path: str) -> Iterator[tuple[str, inspect.Type]]:
    """Every type inside, with where it is; structs of their own are left to their own."""
    match kind:
        case inspect.UnionType():
            for member in kind.types:
                yield from leaves(member, path)
        case inspect.VarTupleType():
            yield from leaves(kind.item_type, f"{path}[]")
        case inspect.TupleType():
            for item in kind.item_types:
                yield from leaves(item, f"{path}[]")
        case inspect.DictType():
            yield from leaves(kind.key_type, f"{path} key")
            yield from leaves(kind.value_type, f"{path}[]")
        case _:
            yield path, kind


@pytest.mark.parametrize("message_type", ALL)
def test_every_number_and_text_has_bounds(message_type: type[msgspec.Struct]) -> None:
    info = inspect.type_info(message_type)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        for path, leaf in leaves(field.type, field.name):
            if isinstance(leaf, inspect.IntType):
                assert leaf.ge is not None and leaf.le is not None, path
            if isinstance(leaf, inspect.FloatType):
                assert leaf.le is not None and math.isfinite(leaf.le), path
            if isinstance(leaf, inspect.StrType):
                assert leaf.max_length is not None or leaf.pattern is not None, path


@pytest.mark.parametrize("message_type", ALL)
@settings(max_examples=6)
@given(data=st.data())
def test_one_value_beyond_its_bounds_and_the_message_is_refused(
    message_type: type[msgspec.Struct], data: st.DataObject
) -> None:
    info = inspect.type_info(message_type)
    assert isinstance(info, inspect.StructType)
    beyond = [(at, bad) for at, field in enumerate(info.fields) for bad in _beyond(field.type)]
    if not beyond:
        return
    at, bad = data.draw(st.sampled_from(beyond))
    message = data.draw(values_of(message_type))
    raw = {field.name: getattr(message, field.name) for field in info.fields}
    raw[info.fields[at].name] = bad
    sent: Any = list(raw.values()) if info.array_like else raw
    with pytest.raises(InvalidMessage):
        decode(msgspec.msgpack.encode(sent), message_type)


def _beyond(kind: inspect.Type) -> list[Any]:
    """Values of the right type that a field of this kind must not have."""
    match kind:
        case inspect.IntType():
            return [bad for bad in (-1, 2**63, 2**64 - 1) if not (kind.ge or 0) <= bad <= (kind.le or 0)]
        case inspect.FloatType():
            return [math.nan, math.inf, 1e300]
        case inspect.StrType(pattern=None):
            return ["x" * ((kind.max_length or 0) + 1)]
        case inspect.StrType():
            return ["a.b", "a b", "*", ">", "x" * 65, "worker-0\n", "é"]
        case inspect.VarTupleType():
            return [[bad] for bad in _beyond(kind.item_type)]
        case inspect.DictType():
            return [{bad: 1} for bad in _beyond(kind.key_type)] + [
                {"a": bad} for bad in _beyond(kind.value_type)
            ]
    return []


@given(text=st.text(max_size=70))
def test_an_id_is_what_a_subject_takes(text: str) -> None:
    """The annotation and `subjects.checked_id` are one rule."""
    data = msgspec.msgpack.encode(text)
    try:
        subjects.checked_id(text)
    except ValueError:
        with pytest.raises(InvalidMessage):
            decode(data, Id)
    else:
        assert decode(data, Id) == decode(data, OptionalId) == text


def test_an_epoch_leaves_room_for_those_to_come() -> None:
    with pytest.raises(InvalidMessage):
        decode(encode_int(2**64 - 1), Epoch)
    assert decode(encode_int(2**62), Number) + 1 < 2**63
    assert decode(encode_int(2**31 - 1), Count) == 2**31 - 1
    assert decode(msgspec.msgpack.encode(3), Seconds) == 3.0


def encode_int(number: int) -> bytes:
    return msgspec.msgpack.encode(number)


@pytest.mark.parametrize("message_type", ALL)
def test_noise_is_a_message_or_refused_by_name(message_type: type[msgspec.Struct]) -> None:
    """Whatever the bytes, decoding raises nothing else; and most of the valid noise is a message."""
    noise = Noise(seed=7)
    for payload in (*GARBAGE, *(noise.payload(message_type) for _ in range(30))):
        try:
            message = decode(payload, message_type)
        except InvalidMessage:
            continue
        assert decode(encode(message), message_type) == message or _has_nan(message)


def _has_nan(message: object) -> bool:
    return "nan" in repr(message)
