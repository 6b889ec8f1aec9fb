"""Messages as a later version would write them."""

from typing import Any

import msgspec

_NEW = "field_of_a_later_version"


def from_the_future(data: bytes) -> bytes:
    """The same, with a field more in the message itself and in each of those that it lists."""
    try:
        said = msgspec.msgpack.decode(data)
    except msgspec.DecodeError:
        return data
    return msgspec.msgpack.encode(_more(said)) if isinstance(said, dict) else data


def _more(said: dict[Any, Any]) -> dict[Any, Any]:
    """Maps below a field may be tables, in which another key would be another row."""
    told = {key: _each(value) if isinstance(value, list) else value for key, value in said.items()}
    return {**told, _NEW: 1}


def _each(values: list[Any]) -> list[Any]:
    return [_more(value) if isinstance(value, dict) else value for value in values]
