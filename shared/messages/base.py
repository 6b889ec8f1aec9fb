"""What every message on the bus is: a frozen struct, encoded as a MessagePack map.

Fields may be added when they have a default; unknown fields are ignored by readers; nothing is renamed or
removed within one version of the subject prefix. Token frames alone are arrays, only ever appended to.
"""

from typing import Any, TypeVar

import msgspec

from shared.errors import InvalidMessage

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {}


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of every control message and event."""


class Empty(Message, frozen=True, kw_only=True):
    """A reply that says only that the command was carried out, or a question without parameters."""


def decode_json(data: bytes | memoryview, message_type: type[M]) -> M:
    """What others say in JSON. Raises InvalidMessage, whatever the bytes are."""
    try:
        return msgspec.json.decode(data, type=message_type)
    except Exception as error:  # as of `decode`
        raise InvalidMessage(f"not a {getattr(message_type, '__name__', message_type)}: {error}") from error


def encode(message: msgspec.Struct) -> bytes:
    """MessagePack bytes of one message."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview, message_type: type[M]) -> M:
    """The message in `data`. Raises InvalidMessage, whatever the bytes are."""
    decoder = _decoders.get(message_type)
    if decoder is None:
        decoder = _decoders[message_type] = msgspec.msgpack.Decoder(message_type)
    try:
        result: M = decoder.decode(data)
    except Exception as error:  # msgspec's own, UnicodeDecodeError, RecursionError: all the sender's doing
        name = getattr(message_type, "__name__", str(message_type))
        raise InvalidMessage(f"not a {name}: {error}") from error
    return result
