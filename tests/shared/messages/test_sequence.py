"""The contract of every message in `shared.messages.sequence`."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InvalidMessage
from shared.messages import sequence
from shared.messages.base import decode
from shared.messages.sequence import Sampling, SequenceRef, SequenceSpec, pack_tokens, unpack_tokens
from tests.shared.messages.contract import (
    check_contract,
    message_types,
    values_of,
)


@pytest.mark.parametrize("message_type", message_types(sequence))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_contract(message_type: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(values_of(message_type))
    check_contract(message)


REF = SequenceRef(request_id="req_1", choice=2, attempt=3)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_tokens_are_packed_little_endian(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert packed == b"".join(token.to_bytes(4, "little") for token in tokens)
    assert unpack_tokens(packed) == tokens
    spec = SequenceSpec(
        ref=REF,
        gateway_id="gateway-0",
        gateway_incarnation=1,
        prompt=packed,
        generated=packed + pack_tokens([1]),
        sampling=Sampling(seed=1, max_tokens=9),
    )
    assert (spec.prompt_tokens, spec.generated_tokens) == (len(tokens), len(tokens) + 1)


def test_what_is_no_row_of_tokens_is_refused() -> None:
    for tokens in ([-1], [2**32]):
        with pytest.raises(OverflowError):
            pack_tokens(tokens)
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
