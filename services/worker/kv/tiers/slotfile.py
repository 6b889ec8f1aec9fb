"""Layout of a disk tier's file: one header, a table of slot headers, the records.

Little-endian; a page of file header, 64 bytes for each slot, then records at multiples of a page. Each header
ends with its own CRC, so that a torn one is none."""

import struct
import zlib
from dataclasses import dataclass

from shared.blocks import HASH_BYTES, BlockHash

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
