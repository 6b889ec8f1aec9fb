"""Records in host memory, each with a checksum: slots of this worker, and slots that other workers lend."""

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.worker.kv.core.tier_copier import StoredBlock
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


class PeerMemory(Protocol):
    """The slots' memory. Called by the copying threads, each call with a deadline."""

    def read(self, place: int, row: RecordRow) -> bool:
        """Read the slot into `row`; False: it is not available."""
        ...

    def write(self, place: int, row: RecordRow) -> bool:
        """Write `row` to the slot; False: it may not have arrived."""
        ...


class PeerTier:
    """Records in host memory that other workers lend. A fault is a miss, never an exception.

    A record's checksum is kept here and compared when it comes back, so that creditors need not be trusted.
    For two threads, as long as they are not at the same slot. `counts`: checksum_failures, read_errors,
    write_errors."""

    def __init__(self, fingerprint: bytes, sums: Checksums = CRC) -> None:
        self._fingerprint = fingerprint
        self._sums = sums
        self._sum_of: dict[int, tuple[BlockHash, int]] = {}
        """Name and checksum of the record in each slot."""
        self._counting = threading.Lock()
        self.memory: PeerMemory | None = None
        """None until a peer lends."""
        self.counts: Counter[str] = Counter()

    def read(self, place: int, name: BlockHash, row: RecordRow) -> bool:
        """Read the slot's record into `row`; False, counted: it is not `name`'s or not intact."""
        held, expected = self._sum_of.get(place, (b"", 0))
        if held != name or self.memory is None or not self.memory.read(place, row):
            return self._bad("read_errors")
        if self._sums.of(row, name, self._fingerprint) != expected:
            return self._bad("checksum_failures")
        return True

    def write(self, node: StoredBlock, row: RecordRow, sum_: int) -> bool:
        """Write `row` with its checksum to the node's slot; False: it failed."""
        self._sum_of.pop(node.place, None)
        if self.memory is None or not self.memory.write(node.place, row):
            return self._bad("write_errors")
        self._sum_of[node.place] = node.name, sum_
        return True

    def forget(self, places: Iterable[int]) -> None:
        """Forget slots that are no longer lent. Any thread may call this."""
        for place in places:
            self._sum_of.pop(place, None)

    def _bad(self, what: str) -> bool:
        with self._counting:
            self.counts[what] += 1
        return False
