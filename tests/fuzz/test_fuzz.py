"""Damaged bytes at every door: a typed error or a true value, never anything else.

A few hundred of each with every run; with `slow` twenty thousand.
"""

import importlib
import pkgutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.lasting.transcript import EventsAfter
from services.worker.kv.tiers.disk import (
    PAGE_BYTES,
    SLOT_BYTES,
    Geometry,
    SlotHeader,
    open_disk,
    pack_slot,
    unpack_slot,
)
from services.worker.peers.transport import wire
from services.worker.peers.transport.base import TransportLimits
from shared import messages
from shared.errors import InvalidMessage, KvasirError, MessageTooLarge
from shared.messages.base import decode, encode
from tests.fuzz.damage import FOLDER, damaged, entries, made
from tests.shared.messages.contract import message_types

LIMITS = TransportLimits(header_bytes=100, buffers=4, message_bytes=1000)
TYPES = [
    kind
    for found in pkgutil.iter_modules(messages.__path__)
    for kind in message_types(importlib.import_module(f"shared.messages.{found.name}"))
]


def is_handled_message(data: bytes) -> None:
    """Whatever message it is taken for."""
    for kind in TYPES:
        try:
            message = decode(data, kind)
        except InvalidMessage:
            continue
        assert decode(encode(message), kind) == message


def is_handled_frame(data: bytes) -> None:
    """As a receiver reads it: prefix, envelope, and what is in its header."""
    if len(data) < wire.PREFIX.size:
        return
    try:
        length, crc = wire.envelope_bytes(data[: wire.PREFIX.size], LIMITS)
        envelope = wire.unpacked(data[wire.PREFIX.size : wire.PREFIX.size + length], crc, LIMITS)
    except (InvalidMessage, MessageTooLarge):
        return
    assert sum(envelope.sizes_bytes) <= LIMITS.message_bytes and len(envelope.header) <= LIMITS.header_bytes
    for read in (partial(decode, message_type=wire.Hello), wire.error_from):
        try:
            found = read(envelope.header)
        except InvalidMessage:
            continue
        assert isinstance(found, wire.Hello | KvasirError)


def is_handled_slot(data: bytes) -> None:
    """Read as the header of a slot, and, where it is one, written again the same."""
    header = unpack_slot(data[:SLOT_BYTES])
    assert header is None or isinstance(header, SlotHeader)
    if header is not None:
        assert unpack_slot(pack_slot(header)) == header


def is_handled_stream(data: bytes) -> None:
    """Events up to a number are left out, wherever the stream is cut into pieces."""
    for number in (-1, 0, 11, 12):
        whole = EventsAfter(number).feed(data)
        pieces = EventsAfter(number)
        assert b"".join(pieces.feed(data[at : at + 1]) for at in range(len(data))) == whole
        assert number >= 0 or whole == data
        assert len(whole) <= len(data)
        again = EventsAfter(number).feed(whole)
        assert again == whole, "who asks twice is told the same"


TARGETS: dict[str, Callable[[bytes], None]] = {
    "messages": is_handled_message,
    "bulk": is_handled_frame,
    "disk": is_handled_slot,
    "sse": is_handled_stream,
}
FEW = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MANY = settings(max_examples=20_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("target", TARGETS)
def test_every_entry_of_the_corpus_is_handled(target: str) -> None:
    for data in entries(target):
        TARGETS[target](data)


def test_what_the_corpus_is_made_of_is_what_lies_there() -> None:
    """`python -m tests.fuzz.damage` writes it anew after a change of a format."""
    for target, files in made().items():
        for name, data in files.items():
            assert (FOLDER / target / name).read_bytes() == data, f"{target}/{name}"


@pytest.mark.parametrize("target", TARGETS)
@FEW
@given(data=st.data())
def test_damaged_bytes_are_handled(target: str, data: st.DataObject) -> None:
    TARGETS[target](data.draw(damaged(target)))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", TARGETS)
@MANY
@given(data=st.data())
def test_many_damaged_bytes_are_handled(target: str, data: st.DataObject) -> None:
    TARGETS[target](data.draw(damaged(target)))


GEOMETRY = Geometry(b"fingerprint 0001", 500, 4)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=damaged("disk"), at=st.integers(0, PAGE_BYTES + 4 * SLOT_BYTES))
def test_a_damaged_file_is_opened_and_read_without_error(tmp_path: Path, table: bytes, at: int) -> None:
    """Into a file of the disk tier, at any place of its headers."""
    import numpy as np

    path = tmp_path / "tier"
    fresh = open_disk(path, GEOMETRY)
    assert fresh is not None
    fresh.close()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(table)
    tier = open_disk(path, GEOMETRY)
    if tier is None:
        return
    row = np.zeros(GEOMETRY.record_bytes, dtype=np.uint8)
    for stored in tier.stored():
        assert not tier.read(stored.place, stored.name, row), "a record that nobody wrote"
    tier.close()
