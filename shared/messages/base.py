"""Base class and codec of all bus messages: frozen structs encoded as MessagePack maps. Within one version of
the subject prefix, fields are never renamed or removed. A new field needs a default, and readers ignore
unknown fields. Token frames are arrays, so their new fields go at the end."""

from typing import Any, TypeVar

import msgspec

from shared.errors import InvalidMessage

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {}


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all control messages and events, which are encoded as maps."""


class Empty(Message, frozen=True, kw_only=True):
    """A message without fields: a plain acknowledgement, or a query without parameters."""


def decode_json(data: bytes | memoryview, message_type: type[M]) -> M:
    """Decode JSON from other programs. Raise InvalidMessage for any malformed input."""
    try:
        return msgspec.json.decode(data, type=message_type)
    except Exception as error:  # as in `decode`
        raise InvalidMessage(f"not a {getattr(message_type, '__name__', message_type)}: {error}") from error


def encode(message: msgspec.Struct) -> bytes:
    """Return the message as MessagePack bytes."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview, message_type: type[M]) -> M:
    """Decode one message. Raise InvalidMessage for any malformed input."""
    decoder = _decoders.get(message_type)
    if decoder is None:
        decoder = _decoders[message_type] = msgspec.msgpack.Decoder(message_type)
    try:
        result: M = decoder.decode(data)
    except Exception as error:  # also UnicodeDecodeError and RecursionError: malformed input
        name = getattr(message_type, "__name__", str(message_type))
        raise InvalidMessage(f"not a {name}: {error}") from error
    return result
