"""Records in a file that outlives the worker. A fault in the file is a miss, never an exception.

The file is not mapped, since a truncated map ends the process. A slot's header is cleared before its record
is overwritten and written after it, so that a killed write leaves an empty slot. Every read is verified.

The layout is little-endian: a page of file header, 64 bytes for each slot, then records at multiples of a
page. Each header ends with its own CRC, so that a torn one is none."""

import errno
import fcntl
import os
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from services.worker.kv.core.tier_copier import StoredBlock
from services.worker.kv.tiers.records import CRC, Checksums, RecordRow
from shared.blocks import HASH_BYTES, BlockHash
from shared.log import get_logger

MAGIC = b"KVASIRKV"
VERSION = 2
PAGE_BYTES = 4096
SLOT_BYTES = 64
_FILE = struct.Struct("<8sHHIQ16s")
_SLOT = struct.Struct("<16s16sIIQQ")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes and model that a file must agree with."""

    fingerprint: bytes
    """16 bytes."""
    record_bytes: int
    slots: int
    sums: int = 0
    """The checksum function (`Checksums.kind`)."""

    @property
    def records_at(self) -> int:
        return PAGE_BYTES + _pages(self.slots * SLOT_BYTES)

    @property
    def stride_bytes(self) -> int:
        return _pages(self.record_bytes)

    @property
    def file_bytes(self) -> int:
        return self.records_at + self.slots * self.stride_bytes

    def record_at(self, place: int) -> int:
        """Return the offset of a slot's record."""
        return self.records_at + place * self.stride_bytes

    def header_at(self, place: int) -> int:
        """Return the offset of a slot's header."""
        return PAGE_BYTES + place * SLOT_BYTES


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """The header of a complete record; other slots have zeros there."""

    name: BlockHash
    parent: BlockHash
    """Empty for a first block."""
    depth: int
    length_bytes: int
    checksum: int


def pack_file(geometry: Geometry) -> bytes:
    """Return the file's first bytes."""
    head = _FILE.pack(
        MAGIC, VERSION, geometry.sums, geometry.slots, geometry.record_bytes, geometry.fingerprint
    )
    return _sealed(head)


FILE_HEADER_BYTES = _FILE.size + _CRC.size


def is_ours(head: bytes) -> bool:
    """Whether a file that begins so was made by a disk tier, of whatever model."""
    return head.startswith(MAGIC)


def pack_slot(header: SlotHeader) -> bytes:
    """Return 64 bytes."""
    packed = _SLOT.pack(
        header.name, header.parent, len(header.parent), header.depth, header.length_bytes, header.checksum
    )
    return _sealed(packed).ljust(SLOT_BYTES, b"\0")


EMPTY_SLOT = bytes(SLOT_BYTES)


def unpack_slot(packed: bytes) -> SlotHeader | None:
    """None when the slot is empty, unfinished or torn."""
    body, crc = packed[: _SLOT.size], packed[_SLOT.size : _SLOT.size + _CRC.size]
    if len(crc) < _CRC.size or packed == EMPTY_SLOT or _CRC.pack(zlib.crc32(body)) != crc:
        return None
    name, parent, parent_bytes, depth, length_bytes, checksum = _SLOT.unpack(body)
    if parent_bytes not in (0, HASH_BYTES):
        return None
    return SlotHeader(name, parent[:parent_bytes], depth, length_bytes, checksum)


def _sealed(packed: bytes) -> bytes:
    return packed + _CRC.pack(zlib.crc32(packed))


def _pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


_logger = get_logger("worker.kv")
_MOST_ASIDE = 100


class DiskTier:
    """An open, locked file, for two threads as long as they are not at the same slot. `counts`: torn_slots,
    short_reads, checksum_failures, read_errors, write_errors; reinitialised, set_aside."""

    def __init__(
        self, descriptor: int, geometry: Geometry, counts: Counter[str], sums: Checksums = CRC
    ) -> None:
        self._file = descriptor
        self._sums = sums
        self.geometry = geometry
        self.counts = counts
        self._slots: list[SlotHeader | None] = [None] * geometry.slots
        self._counting = threading.Lock()

    def stored(self) -> list[StoredBlock]:
        """Return the blocks of an earlier run, as listed in the headers."""
        return [
            StoredBlock(slot.name, slot.parent, slot.depth, place)
            for place, slot in enumerate(self._slots)
            if slot is not None
        ]

    def read(self, place: int, name: BlockHash, row: RecordRow) -> bool:
        """Read the slot's record into `row`; False, counted: it is not `name`'s or not intact."""
        slot = self._slots[place]
        if slot is None or slot.name != name or slot.length_bytes != row.nbytes:
            return self._bad("torn_slots")
        try:
            done = _read_all(self._file, row.data, self.geometry.record_at(place))
        except OSError as error:
            _logger.warning("the disk tier cannot be read: %s", error)
            return self._bad("read_errors")
        if done < row.nbytes:
            return self._bad("short_reads")
        if self._sums.of(row, name, self.geometry.fingerprint) != slot.checksum:
            return self._bad("checksum_failures")
        return True

    def write(self, node: StoredBlock, row: RecordRow, sum_: int) -> bool:
        """Write `row` with its checksum to the node's slot; False: it failed."""
        slot = SlotHeader(node.name, node.parent, node.depth, row.nbytes, sum_)
        self._slots[node.place] = None
        header_at = self.geometry.header_at(node.place)
        try:
            _write_all(self._file, memoryview(EMPTY_SLOT), header_at)
            _write_all(self._file, row.data, self.geometry.record_at(node.place))
            _write_all(self._file, memoryview(pack_slot(slot)), header_at)
        except OSError as error:
            _logger.warning("the disk tier cannot be written: %s", error)
            return self._bad("write_errors")
        self._slots[node.place] = slot
        return True

    def clear(self, places: Iterable[int]) -> None:
        """Empty these slots, also after a restart. Errors are counted."""
        for place in places:
            self._slots[place] = None
            try:
                _write_all(self._file, memoryview(EMPTY_SLOT), self.geometry.header_at(place))
            except OSError as error:
                _logger.warning("a slot of the disk tier cannot be cleared: %s", error)
                self._bad("write_errors")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def load_headers(self) -> None:
        """Read the table of slots, as after a restart. Torn headers are counted and empty."""
        table = bytearray(self.geometry.slots * SLOT_BYTES)
        done = _read_all(self._file, memoryview(table), PAGE_BYTES)
        for place in range(done // SLOT_BYTES):
            packed = bytes(table[place * SLOT_BYTES : (place + 1) * SLOT_BYTES])
            self._slots[place] = unpack_slot(packed)
            self.counts["torn_slots"] += self._slots[place] is None and packed != EMPTY_SLOT

    def _bad(self, what: str) -> bool:
        with self._counting:
            self.counts[what] += 1
        return False


def open_disk(path: Path, geometry: Geometry, sums: Checksums = CRC) -> DiskTier | None:
    """The tier in `path`, made or taken over; None, with a warning, where there cannot be one. A file of
    another model, geometry or version is started afresh; one that is no cache at all is renamed to `….aside`
    first. A full disk, a folder that cannot be written and a file that another worker has open leave the
    worker without a disk tier."""
    counts: Counter[str] = Counter()
    geometry = replace(geometry, sums=sums.kind)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _set_aside(path, counts)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        _logger.warning("no disk tier: %s cannot be opened: %s", path, error)
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        tier = DiskTier(descriptor, geometry, counts, sums)
        _prepare(descriptor, path, tier)
        return tier
    except OSError as error:
        os.close(descriptor)
        _logger.warning("no disk tier: %s", _reason(path, geometry, error))
        return None


def _prepare(descriptor: int, path: Path, tier: DiskTier) -> None:
    geometry, wanted = tier.geometry, pack_file(tier.geometry)
    head = os.pread(descriptor, FILE_HEADER_BYTES, 0)
    if head != wanted:
        if head:
            tier.counts["reinitialised"] += 1
            _logger.warning("the disk tier %s is of another model, size or version: started afresh", path)
        os.ftruncate(descriptor, 0)
    try:
        os.posix_fallocate(descriptor, 0, geometry.file_bytes)
    except OSError:
        os.ftruncate(descriptor, 0)  # half a file would only fill the disk
        raise
    if head == wanted:
        tier.load_headers()
    else:
        _write_all(descriptor, memoryview(wanted), 0)


def _set_aside(path: Path, counts: Counter[str]) -> None:
    if not path.is_file() or path.stat().st_size == 0:
        return
    with path.open("rb") as file:
        head = file.read(FILE_HEADER_BYTES)
    if is_ours(head):
        return
    aside = _unused(path)
    path.rename(aside)
    counts["set_aside"] += 1
    _logger.warning("%s is no cache of KV blocks: renamed to %s", path, aside.name)


def _unused(path: Path) -> Path:
    """Return the first of `….aside`, `….aside-2`, … that does not exist. Raises OSError for too many."""
    suffixes = ["", *(f"-{number}" for number in range(2, _MOST_ASIDE + 1))]
    for name in (path.with_name(f"{path.name}.aside{suffix}") for suffix in suffixes):
        if not os.path.lexists(name):
            return name
    raise OSError(errno.EEXIST, f"{_MOST_ASIDE} files were set aside for it already: remove some")


def _reason(path: Path, geometry: Geometry, error: OSError) -> str:
    if isinstance(error, BlockingIOError):
        return f"{path} is in use by another worker; give each its own"
    if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        return f"{path} needs {geometry.file_bytes} bytes and there is no room; free some, or ask for less"
    return f"{path}: {error}"


def _read_all(descriptor: int, into: "memoryview[int]", offset: int) -> int:
    """Return the number of bytes read: fewer at the end of the file."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def _write_all(descriptor: int, data: "memoryview[int]", offset: int) -> None:
    done = 0
    while done < len(data):
        count = os.pwrite(descriptor, data[done:], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "nothing was written")
        done += count
