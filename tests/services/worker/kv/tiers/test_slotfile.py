"""A slot's header says what was written, or nothing at all."""

from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv.tiers.slotfile import (
    EMPTY_SLOT,
    PAGE_BYTES,
    SLOT_BYTES,
    Geometry,
    SlotHeader,
    pack_file,
    pack_slot,
    unpack_slot,
)

HEADERS = st.builds(
    SlotHeader,
    name=st.binary(min_size=16, max_size=16),
    parent=st.one_of(st.just(b""), st.binary(min_size=16, max_size=16)),
    depth=st.integers(0, 2**32 - 1),
    length_bytes=st.integers(0, 2**40),
    checksum=st.integers(0, 2**32 - 1),
)


@given(HEADERS)
def test_a_header_comes_back(header: SlotHeader) -> None:
    packed = pack_slot(header)
    assert len(packed) == SLOT_BYTES
    assert unpack_slot(packed) == header


@given(HEADERS, st.integers(0, 55), st.integers(1, 255))
def test_a_flipped_byte_makes_it_none(header: SlotHeader, index: int, flip: int) -> None:
    packed = bytearray(pack_slot(header))
    packed[index] ^= flip
    assert unpack_slot(bytes(packed)) is None


@given(HEADERS, st.integers(0, 55))
def test_a_torn_header_is_none_or_whole(header: SlotHeader, kept: int) -> None:
    packed = pack_slot(header)
    torn = packed[:kept].ljust(SLOT_BYTES, b"\0")
    assert unpack_slot(torn) == (header if torn == packed else None)
    assert unpack_slot(packed[:kept]) is None


def test_an_empty_slot_is_none() -> None:
    assert unpack_slot(EMPTY_SLOT) is None


@given(st.integers(1, 10**7), st.integers(0, 10**5))
def test_no_two_things_lie_in_one_place(record_bytes: int, slots: int) -> None:
    geometry = Geometry(b"f" * 16, record_bytes, slots)
    assert len(pack_file(geometry)) <= PAGE_BYTES == geometry.header_at(0)
    assert geometry.header_at(slots) <= geometry.records_at
    assert geometry.record_at(1) - geometry.record_at(0) >= record_bytes
    assert geometry.file_bytes == geometry.record_at(slots)
