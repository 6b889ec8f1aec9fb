"""The right bytes of another block, or of another model, do not pass."""

import numpy as np

from services.worker.kv.tiers.records import checksum

ROW = np.arange(256, dtype=np.uint8)


def test_it_depends_on_bytes_name_and_fingerprint() -> None:
    sums = {
        checksum(ROW, b"name", b"model"),
        checksum(ROW, b"eman", b"model"),
        checksum(ROW, b"name", b"other"),
        checksum(ROW[::-1].copy(), b"name", b"model"),
    }
    assert len(sums) == 4
    assert checksum(ROW.copy(), b"name", b"model") in sums
