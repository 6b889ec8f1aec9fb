"""Records in host memory: slots allocated once, each with a checksum."""

from collections import Counter

import numpy as np
import numpy.typing as npt

from services.worker.kv.tiers.records import CRC, Checksums, RecordRow
from shared.blocks import BlockHash


class HostTier:
    """`slots` records. A slot's checksum is taken when it is filled, and compared when it is read."""

    def __init__(
        self,
        slots: int,
        record_bytes: int,
        fingerprint: bytes,
        sums: Checksums = CRC,
        rows: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        """`rows` `[n, record_bytes]` may have other users too; None: the tier has memory of its own."""
        self.slots = slots
        self.sums = sums
        self.counts: Counter[str] = Counter()
        """checksum_failures."""
        self.fingerprint = fingerprint
        self._rows = np.zeros((slots, record_bytes), dtype=np.uint8) if rows is None else rows
        self._checksums = [-1] * len(self._rows)

    def row(self, place: int) -> RecordRow:
        """Return the slot's bytes, not a copy."""
        row: RecordRow = self._rows[place]
        return row

    def seal(self, place: int, name: BlockHash) -> None:
        """Take the checksum of a slot that was filled with `name`'s bytes."""
        self._checksums[place] = self.sums.of(self._rows[place], name, self.fingerprint)

    def checksum_of(self, place: int) -> int:
        """Return the checksum taken when the slot was sealed."""
        return self._checksums[place]

    def is_intact(self, place: int, name: BlockHash) -> bool:
        """Whether the slot still holds `name`'s bytes."""
        return self._checksums[place] == self.sums.of(self._rows[place], name, self.fingerprint)

    def check(self, place: int, name: BlockHash) -> bool:
        """`is_intact`, counting failures."""
        is_intact = self.is_intact(place, name)
        self.counts["checksum_failures"] += not is_intact
        return is_intact
