"""Clocks."""

import time

from shared import clock


def test_clocks_go_forward() -> None:
    started_s, started_unix_s = clock.monotonic_s(), clock.unix_s()
    time.sleep(0.002)
    assert clock.monotonic_s() > started_s
    assert clock.unix_s() > started_unix_s
