"""The checksum of a record: 64 bits over its bytes, its name and the model's fingerprint.

Workers that exchange records, and files, need the same function (`engine/native/sums.py` has a fast one)."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from services.worker.kv.tiers.records import RecordRow
from shared.blocks import BlockHash


@dataclass(frozen=True, slots=True)
class Checksums:
    """Checksums by one function."""

    kind: int
    """Number of the function in files and messages."""
    digest: Callable[[RecordRow], int]
    """Returns at most 64 bits for a record's bytes."""

    def of(self, row: RecordRow, name: BlockHash, fingerprint: bytes) -> int:
        """Return the checksum of a record that belongs to `name`."""
        return self.digest(row) ^ int.from_bytes(blake2b(name, key=fingerprint, digest_size=8).digest())


CRC = Checksums(0, lambda row: zlib.crc32(row.data))
