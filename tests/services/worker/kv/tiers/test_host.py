"""A slot is intact as long as nobody touches its bytes, and for its own block only."""

import numpy as np

from services.worker.kv.tiers.host import HostTier


def test_a_slot_is_intact_until_a_byte_changes() -> None:
    tier = HostTier(2, 100, b"model")
    tier.row(1)[:] = np.arange(100)
    assert not tier.is_intact(1, b"a")
    tier.seal(1, b"a")
    assert tier.is_intact(1, b"a")
    assert not tier.is_intact(1, b"b")
    assert not tier.is_intact(0, b"a")
    tier.row(1)[50] ^= 4
    assert not tier.is_intact(1, b"a")
