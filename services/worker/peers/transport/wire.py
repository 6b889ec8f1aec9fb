"""The format of a message on a link: a prefix, an envelope, the payload, and a digest of the payload.

    prefix     16 bytes   "KVB2", bytes of the envelope, CRC-32 of the envelope, 0   (little endian)
    envelope   MessagePack array (`Envelope`), with the sender's own header in it
    payload    the buffers, one after the other; a transport may move it another way
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
"""A listener begins with a challenge: random bytes. A refusal leaves the link open, a failure closes it."""


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """Header of a message, before its payload."""

    type: int
    call: int
    """Number of the request on its link, from 1. The reply has the same number."""
    header: bytes
    kind: str = ""
    sizes_bytes: tuple[int, ...] = ()
    deadline_ms: int = 0
    """Time left when a request is sent."""


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """Header of a HELLO, by which a dialler introduces itself."""

    own_id: str
    own_incarnation: int
    peer_id: str
    peer_incarnation: int
    ticket_name: bytes
    proof: bytes
    """Proves that the sender has the ticket (`greeting_proof`), without sending the ticket."""


to_bytes = msgspec.msgpack.Encoder().encode
"""Encodes a header as MessagePack."""


def packed(envelope: Envelope) -> bytes:
    """Return prefix and envelope as bytes."""
    body = to_bytes(envelope)
    return PREFIX.pack(_MAGIC, len(body), zlib.crc32(body), 0) + body


def envelope_bytes(prefix: "bytes | memoryview", limits: TransportLimits) -> tuple[int, int]:
    """Return length and CRC-32 of the envelope. Raises InvalidMessage and MessageTooLarge."""
    magic, length, crc, _ = PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise InvalidMessage("not a message of the bulk plane: the peer speaks another protocol")
    if length > limits.header_bytes + _ENVELOPE_EXTRA_BYTES + _SIZE_BYTES * limits.buffers:
        raise MessageTooLarge(f"an envelope of {length} bytes is over the limit")
    return length, crc


def unpacked(body: "bytes | memoryview", crc: int, limits: TransportLimits) -> Envelope:
    """Decode and check an envelope. Raises InvalidMessage and MessageTooLarge."""
    if zlib.crc32(body) != crc:
        raise InvalidMessage("the envelope was corrupted in transit")
    envelope = decode(body, Envelope)
    check_size(len(envelope.header), envelope.sizes_bytes, limits)
    return envelope


def check_size(header_bytes: int, sizes_bytes: Sequence[int], limits: TransportLimits) -> None:
    """Check announced sizes. Raises MessageTooLarge, or InvalidMessage for a negative size."""
    if header_bytes > limits.header_bytes:
        raise MessageTooLarge(f"a header of {header_bytes} bytes; {limits.header_bytes} are allowed")
    if len(sizes_bytes) > limits.buffers:
        raise MessageTooLarge(f"{len(sizes_bytes)} buffers; {limits.buffers} are allowed")
    if min(sizes_bytes, default=0) < 0:
        raise InvalidMessage("a buffer of negative size")
    if sum(sizes_bytes) > limits.message_bytes:
        raise MessageTooLarge(f"{sum(sizes_bytes)} bytes in one message; {limits.message_bytes} are allowed")


def ticket_name(ticket: bytes) -> bytes:
    """Return the name by which the issuer finds a ticket. It does not reveal the ticket."""
    return blake2b(b"kvasir bulk ticket", key=ticket, digest_size=16).digest()


def greeting_proof(ticket: bytes, challenge: bytes) -> bytes:
    """Return the dialler's proof, valid on the link of this challenge only."""
    return blake2b(b"kvasir bulk greeting" + challenge, key=ticket, digest_size=16).digest()


def welcome_proof(ticket: bytes, challenge: bytes) -> bytes:
    """Return the answering side's proof: another process may have taken its port."""
    return blake2b(b"kvasir bulk welcome" + challenge, key=ticket, digest_size=16).digest()


def error_from(header: bytes) -> KvasirError:
    """Decode an error from `shared.errors.to_wire`. Raises InvalidMessage for anything else."""
    return from_wire(decode(header, dict[str, Any]))
