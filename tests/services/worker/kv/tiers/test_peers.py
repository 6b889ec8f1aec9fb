"""Records at peers: what does not come back as it was sent is a counted miss."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from services.worker.kv.core.tier_copier import StoredBlock
from services.worker.kv.tiers.checksums import CRC
from services.worker.kv.tiers.peers import PeerTier
from services.worker.kv.tiers.records import RecordRow

NAME, OTHER, FINGERPRINT = b"n" * 16, b"o" * 16, b"f" * 16
BYTES = 64


@dataclass
class Memory:
    """Of a creditor that is well, or not."""

    rows: dict[int, RecordRow] = field(default_factory=dict)
    is_well: bool = True

    def read(self, place: int, row: RecordRow) -> bool:
        if self.is_well:
            row[:] = self.rows[place]
        return self.is_well

    def write(self, place: int, row: RecordRow) -> bool:
        if self.is_well:
            self.rows[place] = row.copy()
        return self.is_well


@pytest.fixture
def tier() -> PeerTier:
    made = PeerTier(FINGERPRINT)
    made.memory = Memory()
    return made


def row_of(seed: int) -> RecordRow:
    return np.random.default_rng(seed).integers(0, 256, BYTES, dtype=np.uint8)


def write(tier: PeerTier, place: int, row: RecordRow) -> bool:
    return tier.write(StoredBlock(NAME, b"", 0, place), row, CRC.of(row, NAME, FINGERPRINT))


def read(tier: PeerTier, place: int, name: bytes = NAME) -> RecordRow | None:
    row = np.zeros(BYTES, dtype=np.uint8)
    return row if tier.read(place, name, row) else None


def test_bytes_of_another_block_are_a_miss(tier: PeerTier) -> None:
    """Also where a creditor mixed up its slots: what comes is whole, and not what was asked for."""
    write(tier, 3, row_of(1))
    assert read(tier, 3, OTHER) is None
    assert isinstance(tier.memory, Memory)
    tier.memory.rows[3] = row_of(2)
    assert read(tier, 3) is None
    assert tier.counts == {"read_errors": 1, "checksum_failures": 1}


def test_a_slot_that_was_lost_or_never_filled_is_a_miss(tier: PeerTier) -> None:
    write(tier, 3, row_of(1))
    tier.forget([3])
    assert read(tier, 3) is None
    assert read(tier, 4) is None
    assert tier.counts == {"read_errors": 2}


def test_a_write_that_failed_leaves_nothing_that_could_be_read(tier: PeerTier) -> None:
    write(tier, 3, row_of(1))
    assert isinstance(tier.memory, Memory)
    tier.memory.is_well = False
    assert not write(tier, 3, row_of(2))
    tier.memory.is_well = True
    assert read(tier, 3) is None
    assert tier.counts == {"write_errors": 1, "read_errors": 1}
