"""Real files, damaged in every way: a read gives what was written, or is a counted miss; so are headers."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv.core.tier_copier import StoredBlock
from services.worker.kv.tiers.disk import (
    PAGE_BYTES,
    SLOT_BYTES,
    DiskTier,
    Geometry,
    SlotHeader,
    open_disk,
    pack_file,
    pack_slot,
    unpack_slot,
)
from services.worker.kv.tiers.records import CRC, RecordRow
from tests.services.worker.kv.rig import flip_byte

GEOMETRY = Geometry(b"fingerprint 0001", 10_000, 4)
OTHERS = {
    "fingerprint": Geometry(b"fingerprint 0002", 10_000, 4),
    "record": Geometry(b"fingerprint 0001", 9_999, 4),
    "slots": Geometry(b"fingerprint 0001", 10_000, 5),
}


def record(number: int) -> tuple[StoredBlock, RecordRow]:
    """Block `number` of a chain, in the slot of that number."""
    row = np.random.default_rng(number).integers(0, 256, GEOMETRY.record_bytes, dtype=np.uint8)
    return StoredBlock(_name(number), _name(number - 1) if number else b"", number, number), row


def _name(number: int) -> bytes:
    return bytes([number + 1]) * 16


_OPEN: list[DiskTier] = []


def opened(path: Path, geometry: Geometry = GEOMETRY) -> DiskTier:
    """A file has one tier: what was opened before is closed."""
    close()
    tier = open_disk(path, geometry)
    assert tier is not None
    _OPEN.append(tier)
    return tier


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    close()


def close() -> None:
    while _OPEN:
        _OPEN.pop().close()


def write(tier: DiskTier, number: int) -> None:
    node, row = record(number)
    assert tier.write(node, row, CRC.of(row, node.name, tier.geometry.fingerprint))


def read(tier: DiskTier, number: int) -> bool:
    """Whether it is there; and then it is what was written."""
    node, row = record(number)
    found = np.zeros_like(row)
    ok = tier.read(node.place, node.name, found)
    assert not ok or np.array_equal(found, row)
    return ok


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a file that holds blocks 0, 1 and 2."""
    made = tmp_path / "folder" / "kv"
    tier = opened(made)
    for number in range(3):
        write(tier, number)
    close()
    return made


@contextmanager
def files_up_to(size_bytes: int) -> Iterator[None]:
    """As where a disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_restart_finds_what_was_written(path: Path) -> None:
    tier = opened(path)
    assert tier.stored() == [record(number)[0] for number in range(3)]
    assert [read(tier, number) for number in range(4)] == [True, True, True, False]


AT = {GEOMETRY.record_at(1) + at: 1 for at in (0, 4_321, GEOMETRY.record_bytes - 1)}
AT |= {GEOMETRY.header_at(0) + at: 0 for at in range(0, 56, 5)}
"""Places of bytes in records and headers, and the slots of those."""


@pytest.mark.parametrize("place", AT)
def test_a_slot_with_a_flipped_byte_is_a_miss(path: Path, place: int) -> None:
    """Where it is in a header, the slot is empty."""
    flip_byte(path, place)
    tier = opened(path)
    assert [read(tier, number) for number in range(3)] == [number != AT[place] for number in range(3)]
    is_record = AT[place] == 1
    assert tier.counts["checksum_failures"] == is_record
    assert [block.depth for block in tier.stored()] == ([0, 1, 2] if is_record else [1, 2])


def test_swapped_records_are_misses(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(GEOMETRY.record_at(0))
        first = file.read(GEOMETRY.record_bytes)
        file.seek(GEOMETRY.record_at(1))
        file.write(first)
    tier = opened(path)
    assert [read(tier, number) for number in range(3)] == [True, False, True]


@pytest.mark.parametrize("reopened", [True, False])
@pytest.mark.parametrize("keep", [GEOMETRY.record_at(1) + 5, GEOMETRY.record_at(1), 4096 + 70, 10, 0])
def test_a_short_file_is_a_miss(path: Path, keep: int, reopened: bool) -> None:
    tier = opened(path)
    if reopened:
        close()
    os.truncate(path, keep)
    tier = opened(path) if reopened else tier
    whole = keep > GEOMETRY.record_at(0)
    assert [read(tier, number) for number in range(3)] == [whole, False, False]
    for number in range(3):
        write(tier, number)
        assert read(tier, number)


@pytest.mark.parametrize("other", OTHERS)
def test_another_models_file_is_started_afresh(path: Path, other: str) -> None:
    tier = opened(path, OTHERS[other])
    assert tier.stored() == []
    assert tier.counts["reinitialised"] == 1
    tier = opened(path)
    assert not any(read(tier, number) for number in range(3))


def test_a_file_that_is_no_cache_is_kept_aside_beside_those_that_were_before(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    for text in ("a thesis", "its second edition", "its third"):
        path.write_text(text)
        tier = opened(path)
        assert tier.counts["set_aside"] == 1
        write(tier, 0)
        assert read(tier, 0)
        kept = {each.name: each.read_text() for each in tmp_path.glob("kv.aside*")}
    assert kept == {"kv.aside": "a thesis", "kv.aside-2": "its second edition", "kv.aside-3": "its third"}


def test_two_workers_do_not_share_a_file(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = opened(path)
    assert open_disk(path, GEOMETRY) is None
    assert "another worker" in caplog.text
    assert read(tier, 0)


def test_no_room_is_no_tier(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with files_up_to(20_000):
        assert open_disk(tmp_path / "kv", GEOMETRY) is None
    assert "no room" in caplog.text
    assert (tmp_path / "kv").stat().st_size == 0


def test_a_write_that_fails_is_counted_and_leaves_the_slot_empty(path: Path) -> None:
    tier = opened(path)
    node, row = record(1)
    with files_up_to(GEOMETRY.record_at(1) + 100):
        assert not tier.write(node, row, 0)
    assert tier.counts["write_errors"] == 1
    tier = opened(path)
    assert [read(tier, number) for number in range(3)] == [True, False, True]


WRITER = """
import sys
from pathlib import Path
from tests.services.worker.kv.tiers.test_disk import opened, write
tier = opened(Path(sys.argv[1]))
print("writing", flush=True)
while True:
    for number in range(4):
        write(tier, number)
"""


@pytest.mark.parametrize("after_s", [0.0, 0.003, 0.01])
def test_a_killed_writer_leaves_whole_blocks_or_none(path: Path, after_s: float) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    with writer.stdout:
        assert writer.stdout.readline() == b"writing\n"
        if after_s:
            with pytest.raises(subprocess.TimeoutExpired):
                writer.wait(after_s)
        writer.send_signal(signal.SIGKILL)
        writer.wait(10)
    tier = opened(path)
    listed = {block.depth for block in tier.stored()}
    assert len(listed) >= 2  # one slot at most was being written
    assert {number for number in range(4) if read(tier, number)} == listed


HEADERS = st.builds(
    SlotHeader,
    name=st.binary(min_size=16, max_size=16),
    parent=st.one_of(st.just(b""), st.binary(min_size=16, max_size=16)),
    depth=st.integers(0, 2**32 - 1),
    length_bytes=st.integers(0, 2**40),
    checksum=st.integers(0, 2**64 - 1),
)


@given(HEADERS)
def test_a_header_comes_back(header: SlotHeader) -> None:
    packed = pack_slot(header)
    assert len(packed) == SLOT_BYTES
    assert unpack_slot(packed) == header


@given(HEADERS, st.integers(0, 59), st.integers(1, 255))
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


@given(st.integers(1, 10**7), st.integers(0, 10**5))
def test_no_two_things_lie_in_one_place(record_bytes: int, slots: int) -> None:
    geometry = Geometry(b"f" * 16, record_bytes, slots)
    assert len(pack_file(geometry)) <= PAGE_BYTES == geometry.header_at(0)
    assert geometry.header_at(slots) <= geometry.records_at
    assert geometry.record_at(1) - geometry.record_at(0) >= record_bytes
    assert geometry.file_bytes == geometry.record_at(slots)
