"""The form of a message on a link: a prefix, an envelope, the payload, a digest of the payload.

    prefix     16 bytes   "KVB2", bytes of the envelope, CRC-32 of the envelope, 0   (little endian)
    envelope   MessagePack array (`Envelope`), with the sender's own header in it
    payload    the buffers, one after the other; a transport may carry it another way
    digest     16 bytes, only after a payload (`services.worker.peers.transport.digest`)

Knows no sockets and no threads.
"""

import struct
import zlib
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from services.worker.peers.transport.base import TransportLimits
from shared.errors import InvalidMessage, KvasirError, MessageTooLarge, from_wire
from shared.messages.base import decode

PREFIX = struct.Struct("<4sIII")
DIGEST_BYTES = 16
_MAGIC = b"KVB2"
_ENVELOPE_EXTRA_BYTES = 1 << 12
_SIZE_BYTES = 9

HELLO, WELCOME, REQUEST, REPLY, REFUSAL, FAILURE, CHALLENGE = range(7)
"""A listener begins with a challenge, random bytes. A refusal is the answer of a receiver and leaves the link
as it is; after a failure it is closed."""


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """What precedes a payload."""

    type: int
    call: int
    """Counts requests of a link from 1; its answer has the same number."""
    header: bytes
    kind: str = ""
    sizes_bytes: tuple[int, ...] = ()
    deadline_ms: int = 0
    """Of a request: what is left of it when it is sent."""


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """With what a dialler introduces itself: the header of a HELLO."""

    own_id: str
    own_incarnation: int
    peer_id: str
    peer_incarnation: int
    ticket_name: bytes
    proof: bytes
    """That the sender has the ticket, on this link (`greeting_proof`); the ticket itself does not travel."""


_encode = msgspec.msgpack.Encoder().encode


def packed(envelope: Envelope) -> bytes:
    """Prefix and envelope."""
    body = _encode(envelope)
    return PREFIX.pack(_MAGIC, len(body), zlib.crc32(body), 0) + body


def envelope_bytes(prefix: "bytes | memoryview", limits: TransportLimits) -> tuple[int, int]:
    """Length and CRC-32 of the envelope that follows. Raises InvalidMessage and MessageTooLarge."""
    magic, length, crc, _ = PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise InvalidMessage("this is no message of the bulk plane: the peer speaks another protocol")
    if length > limits.header_bytes + _ENVELOPE_EXTRA_BYTES + _SIZE_BYTES * limits.buffers:
        raise MessageTooLarge(f"an envelope of {length} bytes is over the limit")
    return length, crc


def unpacked(body: "bytes | memoryview", crc: int, limits: TransportLimits) -> Envelope:
    """Raises InvalidMessage and MessageTooLarge."""
    if zlib.crc32(body) != crc:
        raise InvalidMessage("the envelope was corrupted on its way")
    envelope = decode(body, Envelope)
    check_size(len(envelope.header), envelope.sizes_bytes, limits)
    return envelope


def check_size(header_bytes: int, sizes_bytes: Sequence[int], limits: TransportLimits) -> None:
    """Raises MessageTooLarge, or InvalidMessage for a negative size."""
    if header_bytes > limits.header_bytes:
        raise MessageTooLarge(f"a header of {header_bytes} bytes; {limits.header_bytes} are allowed")
    if len(sizes_bytes) > limits.buffers:
        raise MessageTooLarge(f"{len(sizes_bytes)} buffers; {limits.buffers} are allowed")
    if min(sizes_bytes, default=0) < 0:
        raise InvalidMessage("a buffer of negative size")
    if sum(sizes_bytes) > limits.message_bytes:
        raise MessageTooLarge(f"{sum(sizes_bytes)} bytes in one message; {limits.message_bytes} are allowed")


def hello(body: bytes) -> Hello:
    """Raises InvalidMessage."""
    return decode(body, Hello)


def ticket_name(ticket: bytes) -> bytes:
    """By which its issuer finds it; says nothing of it."""
    return blake2b(b"kvasir bulk ticket", key=ticket, digest_size=16).digest()


def greeting_proof(ticket: bytes, challenge: bytes) -> bytes:
    """Of who dials. It is good for the link on which this challenge was heard, and for no other."""
    return blake2b(b"kvasir bulk greeting" + challenge, key=ticket, digest_size=16).digest()


def welcome_proof(ticket: bytes, challenge: bytes) -> bytes:
    """Of who answers: it is not some other process that has the port now."""
    return blake2b(b"kvasir bulk welcome" + challenge, key=ticket, digest_size=16).digest()


def to_bytes(value: Any) -> bytes:
    """MessagePack of whatever goes into a header."""
    return _encode(value)


def error_from(header: bytes) -> KvasirError:
    """What `shared.errors.to_wire` made. Raises InvalidMessage for anything else."""
    return from_wire(decode(header, dict[str, Any]))
