"""The contract that every message keeps, the rules of encoding, and that the bounds fit the bus."""

import importlib
import math
import pkgutil
from collections.abc import Iterator
from typing import Any

import msgpack  # type: ignore[import-untyped]
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from shared import messages, subjects
from shared.blocks import HASH_BYTES
from shared.errors import InvalidMessage
from shared.messages import lending, prefixes, reports, tokens
from shared.messages.base import Empty, Message, decode, encode
from shared.messages.sequence import (
    FinishReason,
    Sampling,
    SequenceRef,
    SequenceSpec,
    pack_tokens,
    unpack_tokens,
)
from shared.messages.values import Count, Epoch, Id, Number, OptionalId, Seconds
from tests.shared.messages.contract import check_contract, message_types, values_of
from tests.shared.messages.noise import GARBAGE, Noise

NAMES = [found.name for found in pkgutil.iter_modules(messages.__path__)]
MODULES = [importlib.import_module(f"shared.messages.{name}") for name in NAMES]


class OldNote(Message, frozen=True, kw_only=True):
    text: str
    pages: int = 1


class NewNote(Message, frozen=True, kw_only=True):
    text: str
    pages: int = 1
    colour: str = "blue"


def test_a_message_is_a_map_and_defaults_do_not_travel() -> None:
    assert msgpack.unpackb(encode(OldNote(text="a", pages=1))) == {"text": "a"}
    assert msgpack.unpackb(encode(OldNote(text="a", pages=2))) == {"text": "a", "pages": 2}
    assert encode(Empty()) == b"\x80"


def test_old_and_new_read_each_other() -> None:
    assert decode(encode(OldNote(text="a", pages=3)), NewNote) == NewNote(text="a", pages=3)
    assert decode(encode(NewNote(text="a", pages=3, colour="red")), OldNote) == OldNote(text="a", pages=3)


@pytest.mark.parametrize(
    "data", [b"", b"\x80", b"\xc1", b"\x92\x01", b"\x81\xa4text\x01", b"\x81\xa4text\xa1a\x00"]
)
def test_what_is_no_such_message_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidMessage):
        decode(data, OldNote)


def test_only_token_frames_are_arrays() -> None:
    """Every struct in every module is a map, but for what token frames are made of."""
    arrays = {kind for found in MODULES for kind in message_types(found) if kind.__struct_config__.array_like}
    assert arrays == {tokens.TokenLogprobs, tokens.TokenDelta, tokens.TokenFrame}


def test_no_message_forbids_unknown_fields() -> None:
    for found in MODULES:
        for kind in message_types(found):
            assert not kind.__struct_config__.forbid_unknown_fields and kind.__struct_config__.frozen, kind


@pytest.mark.parametrize("message_type", [kind for found in MODULES for kind in message_types(found)])
@settings(max_examples=10)
@given(data=st.data())
def test_every_message_keeps_the_contract(message_type: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(values_of(message_type))
    check_contract(message)


REF = SequenceRef(request_id="req_1", choice=2, attempt=3)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_tokens_are_packed_little_endian(row: list[int]) -> None:
    packed = pack_tokens(row)
    assert packed == b"".join(token.to_bytes(4, "little") for token in row) and unpack_tokens(packed) == row
    spec = SequenceSpec(
        ref=REF,
        gateway_id="gateway-0",
        gateway_incarnation=1,
        prompt=packed,
        generated=packed + pack_tokens([1]),
        sampling=Sampling(seed=1, max_tokens=9),
    )
    assert (spec.prompt_tokens, spec.generated_tokens) == (len(row), len(row) + 1)


def test_what_is_no_row_of_tokens_is_refused() -> None:
    for row in ([-1], [2**32]):
        with pytest.raises(OverflowError):
            pack_tokens(row)
    with pytest.raises(ValueError, match="multiple"):
        unpack_tokens(b"12345")


def test_a_reference_names_an_attempt_of_a_sequence() -> None:
    assert (REF.key, str(REF)) == (("req_1", 2), "req_1/2#3")
    assert REF.key == SequenceRef(request_id="req_1", choice=2, attempt=4).key


@pytest.mark.parametrize("field", ["prompt", "generated"])
def test_tokens_that_are_not_whole_are_no_message(field: str) -> None:
    """Keeps three bytes of a prompt from failing wherever it is unpacked."""
    ref = {"request_id": "r", "choice": 0, "attempt": 1}
    spec = {"ref": ref, "gateway_id": "g", "gateway_incarnation": 1, "prompt": bytes(4), "generated": b""}
    broken = {**spec, "sampling": {"seed": 1, "max_tokens": 4}, field: bytes(7)}
    with pytest.raises(InvalidMessage, match="no whole number"):
        decode(msgspec.msgpack.encode(broken), SequenceSpec)


def test_the_bytes_of_a_frame_are_arrays_in_this_order() -> None:
    """Append-only: nothing here may change but by a longer list."""
    logprobs = (tokens.TokenLogprobs(-0.5, ((7, -0.5), (9, -1.5))), tokens.TokenLogprobs(-2.0))
    delta = tokens.TokenDelta("req_1", 0, 1, 5, (7, 8), FinishReason.STOP, 3, logprobs, b"p")
    frame = tokens.TokenFrame("worker-0", 9, (delta,))
    packed = [[-0.5, [[7, -0.5], [9, -1.5]], b""], [-2.0, [], b""]]
    written = ["req_1", 0, 1, 5, [7, 8], "stop", 3, packed, b"p"]
    assert msgpack.unpackb(encode(frame)) == ["worker-0", 9, [written]]


def test_a_frame_of_an_older_writer_is_read_with_defaults() -> None:
    data = msgpack.packb(["worker-0", 9, [["req_1", 0, 1, 5, [7, 8]]]])
    delta = decode(data, tokens.TokenFrame).deltas[0]
    assert (delta.tokens, delta.finish_reason, delta.cached_tokens) == ((7, 8), None, 0)
    assert delta.logprobs == ()


def test_a_frame_that_lacks_a_required_element_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="at least length 5"):
        decode(msgpack.packb(["worker-0", 9, [["req_1", 0, 1, 5]]]), tokens.TokenFrame)


@pytest.mark.parametrize(
    ("free", "evictable", "doomed", "plannable"), [(5, 0, 0, 5), (5, 3, 0, 8), (5, 3, 6, 2), (1, 0, 4, 0)]
)
def test_what_a_plan_may_count_on(free: int, evictable: int, doomed: int, plannable: int) -> None:
    capacity = reports.Capacity(
        total_blocks=10, free_blocks=free, evictable_blocks=evictable, doomed_blocks=doomed, lent_blocks=2
    )
    assert capacity.plannable_blocks == plannable


NATS_DEFAULT_PAYLOAD_BYTES = 1 << 20


def test_the_largest_grant_fits_into_a_message() -> None:
    grant = lending.Grant(
        creditor_id="w" * 64,
        creditor_incarnation=2**62,
        grant_id=2**62,
        generation=2**62,
        blocks=tuple(range(2**31 - lending.MOST_GRANT_BLOCKS, 2**31)),
        lease_s=5.0,
    )
    assert len(encode(grant)) < 0.9 * NATS_DEFAULT_PAYLOAD_BYTES


def test_the_largest_news_fit_into_a_message() -> None:
    most = prefixes.MOST_NEWS_BLOCKS
    news = prefixes.WorkerPrefixes(
        worker_id="w" * 64, incarnation=2**62, seq=2**62, added=bytes(most * HASH_BYTES), tiers=bytes(most)
    )
    assert len(encode(news)) < 0.9 * NATS_DEFAULT_PAYLOAD_BYTES


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
def test_one_value_beyond_its_bounds_is_refused(
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
            return [{b: 1} for b in _beyond(kind.key_type)] + [{"a": b} for b in _beyond(kind.value_type)]
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
    assert decode(encode_int(2**62), Number) + 1 < 2**63 and decode(encode_int(2**31 - 1), Count) == 2**31 - 1
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
        assert decode(encode(message), message_type) == message or "nan" in repr(message)
