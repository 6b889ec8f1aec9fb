"""Clocks."""

import time

from shared import clock


def test_clocks_and_incarnations_go_forward() -> None:
    started_s, incarnation = clock.monotonic_s(), clock.new_incarnation()
    time.sleep(0.002)
    assert clock.monotonic_s() > started_s
    assert clock.new_incarnation() > incarnation
    assert abs(clock.unix_s() - clock.new_incarnation() / 1e9) < 60
