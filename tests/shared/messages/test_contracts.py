"""The contract that every message keeps, the rules of encoding, and that the bounds fit the bus."""

import importlib
import pkgutil

import msgpack  # type: ignore[import-untyped]
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import messages
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
from tests.shared.messages.contract import (
    check_contract,
    message_types,
    values_of,
)

MODULES = [
    importlib.import_module(f"shared.messages.{found.name}")
    for found in pkgutil.iter_modules(messages.__path__)
]


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
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_every_message_keeps_the_contract(message_type: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(values_of(message_type))
    check_contract(message)


REF = SequenceRef(request_id="req_1", choice=2, attempt=3)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_tokens_are_packed_little_endian(row: list[int]) -> None:
    packed = pack_tokens(row)
    assert packed == b"".join(token.to_bytes(4, "little") for token in row)
    assert unpack_tokens(packed) == row
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
    assert msgpack.unpackb(encode(frame)) == [
        "worker-0",
        9,
        [["req_1", 0, 1, 5, [7, 8], "stop", 3, packed, b"p"]],
    ]


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
