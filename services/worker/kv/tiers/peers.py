"""Records in host memory that other workers lend. Whatever goes wrong with one is a miss, never an exception.

A record's checksum, over fingerprint, name and bytes, is taken here when it is made and compared when it
comes back: what a creditor does with its memory need not be believed. Knows slots and bytes; no link."""

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from services.worker.kv.core.tier_copier import StoredBlock
from services.worker.kv.tiers.checksums import CRC, Checksums
from services.worker.kv.tiers.records import RecordRow
from shared.blocks import BlockHash


class PeerMemory(Protocol):
    """Where the slots are. Called by the threads that copy, each call with a deadline."""

    def read(self, place: int, row: RecordRow) -> bool:
        """The slot's bytes into `row`; False when they cannot be had (any more)."""
        ...

    def write(self, place: int, row: RecordRow) -> bool:
        """`row` into the slot; False when it could not be sent, or may not have arrived."""
        ...


class PeerTier:
    """For two threads, as long as they are not at the same slot. `counts`: checksum_failures, read_errors,
    write_errors."""

    def __init__(self, fingerprint: bytes, sums: Checksums = CRC) -> None:
        self._fingerprint = fingerprint
        self._sums = sums
        self._sum_of: dict[int, tuple[BlockHash, int]] = {}
        """By slot: whose bytes were sent there."""
        self._counting = threading.Lock()
        self.memory: PeerMemory | None = None
        """None until a peer lends."""
        self.counts: Counter[str] = Counter()

    def read(self, place: int, name: BlockHash, row: RecordRow) -> bool:
        """The slot's record into `row`. False, counted, when it is not `name`'s or not intact."""
        held, expected = self._sum_of.get(place, (b"", 0))
        if held != name or self.memory is None or not self.memory.read(place, row):
            return self._bad("read_errors")
        if self._sums.of(row, name, self._fingerprint) != expected:
            return self._bad("checksum_failures")
        return True

    def write(self, node: StoredBlock, row: RecordRow, sum_: int) -> bool:
        """`row`, whose checksum was taken when it was made, to the node's slot. False when it failed."""
        self._sum_of.pop(node.place, None)
        if self.memory is None or not self.memory.write(node.place, row):
            return self._bad("write_errors")
        self._sum_of[node.place] = node.name, sum_
        return True

    def forget(self, places: Iterable[int]) -> None:
        """These are lent no more. Any thread may call this."""
        for place in places:
            self._sum_of.pop(place, None)

    def _bad(self, what: str) -> bool:
        with self._counting:
            self.counts[what] += 1
        return False
