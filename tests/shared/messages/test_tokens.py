"""The contract of every message in `shared.messages.tokens`."""

import msgpack  # type: ignore[import-untyped]
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InvalidMessage
from shared.messages import tokens
from shared.messages.base import decode, encode
from shared.messages.sequence import FinishReason
from tests.shared.messages.contract import (
    check_contract,
    message_types,
    values_of,
)


@pytest.mark.parametrize("message_type", message_types(tokens))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_contract(message_type: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(values_of(message_type))
    check_contract(message)


def test_the_bytes_of_a_frame_are_arrays_in_this_order() -> None:
    """Append-only: nothing here may change but by a longer list."""
    logprobs = (tokens.TokenLogprobs(-0.5, ((7, -0.5), (9, -1.5))), tokens.TokenLogprobs(-2.0))
    delta = tokens.TokenDelta("req_1", 0, 1, 5, (7, 8), FinishReason.STOP, 3, logprobs, b"p")
    frame = tokens.TokenFrame("worker-0", 9, (delta,))
    packed = [[-0.5, [[7, -0.5], [9, -1.5]]], [-2.0, []]]
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
