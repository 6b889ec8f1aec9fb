"""Envelopes survive the wire, and other bytes are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.peers.transport import wire
from services.worker.peers.transport.base import TransportLimits
from shared.errors import InvalidMessage, MessageTooLarge, Overloaded, to_wire

LIMITS = TransportLimits(header_bytes=100, buffers=4, message_bytes=1000)


def _read(data: bytes) -> wire.Envelope:
    length, crc = wire.envelope_bytes(data[: wire.PREFIX.size], LIMITS)
    body = data[wire.PREFIX.size : wire.PREFIX.size + length]
    if len(body) < length:
        raise InvalidMessage("a reader waits for the rest")
    return wire.unpacked(body, crc, LIMITS)


@given(
    st.builds(
        wire.Envelope,
        st.integers(0, 5),
        st.integers(0, 2**63),
        st.binary(max_size=100),
        st.text(max_size=10),
        st.lists(st.integers(0, 250), max_size=4).map(tuple),
        st.integers(0, 2**32),
    )
)
def test_a_packed_envelope_is_read_back(envelope: wire.Envelope) -> None:
    assert _read(wire.packed(envelope)) == envelope


@given(st.integers(0, 200), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_in_the_spare_word(place: int, flip: int) -> None:
    data = bytearray(wire.packed(wire.Envelope(wire.REQUEST, 1, b"header", "kind", (1, 2), 100)))
    place %= len(data)
    data[place] ^= flip
    if 12 <= place < 16:
        _read(bytes(data))
    else:
        with pytest.raises((InvalidMessage, MessageTooLarge)):
            _read(bytes(data))


@pytest.mark.parametrize(
    ("header", "sizes"), [(bytes(101), ()), (b"", (1, 1, 1, 1, 1)), (b"", (600, 600)), (b"", (-1,))]
)
def test_messages_above_the_limits_are_refused(header: bytes, sizes: tuple[int, ...]) -> None:
    with pytest.raises((MessageTooLarge, InvalidMessage)):
        _read(wire.packed(wire.Envelope(wire.REQUEST, 1, header, "kind", sizes)))


def test_errors_keep_their_type() -> None:
    error = wire.error_from(wire.to_bytes(to_wire(Overloaded("later", retry_after_s=2.0))))
    assert isinstance(error, Overloaded) and error.retry_after_s == 2.0
    with pytest.raises(InvalidMessage):
        wire.error_from(b"\xc1")
