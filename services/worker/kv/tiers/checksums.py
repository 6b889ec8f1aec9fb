"""What a record is verified by: 64 bits over its bytes, its name and the model's fingerprint.

Which function is over the bytes is the engine's to say (`engine/native/sums.py` has one ten times as fast as
CRC-32); a file's checksums, and another worker's, mean something only to whoever computes the same."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from services.worker.kv.tiers.records import RecordRow
from shared.blocks import BlockHash


@dataclass(frozen=True, slots=True)
class Checksums:
    """By one function."""

    kind: int
    """Names it, in files and messages."""
    digest: Callable[[RecordRow], int]
    """At most 64 bits, of a record's bytes."""

    def of(self, row: RecordRow, name: BlockHash, fingerprint: bytes) -> int:
        """Of a record that belongs to `name`."""
        return self.digest(row) ^ int.from_bytes(blake2b(name, key=fingerprint, digest_size=8).digest())


CRC = Checksums(0, lambda row: zlib.crc32(row.data))
