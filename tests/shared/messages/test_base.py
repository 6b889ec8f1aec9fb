"""The rules of encoding, on messages made for the purpose."""

import pkgutil

import msgpack  # type: ignore[import-untyped]
import pytest

from shared import messages
from shared.errors import InvalidMessage
from shared.messages import tokens
from shared.messages.base import Empty, Message, decode, encode
from tests.shared.messages import contract


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
    arrays = {
        kind
        for found in pkgutil.iter_modules(messages.__path__)
        for kind in contract.message_types(__import__(f"shared.messages.{found.name}", fromlist=["x"]))
        if kind.__struct_config__.array_like
    }
    assert arrays == {tokens.TokenLogprobs, tokens.TokenDelta, tokens.TokenFrame}


def test_no_message_forbids_unknown_fields() -> None:
    for found in pkgutil.iter_modules(messages.__path__):
        for kind in contract.message_types(__import__(f"shared.messages.{found.name}", fromlist=["x"])):
            assert not kind.__struct_config__.forbid_unknown_fields and kind.__struct_config__.frozen, kind
