"""A slow tier takes the time it should, and is given up when that is too long."""

from time import monotonic

import pytest

from services.worker.kv.tiers.throttle import Throttle


def test_it_takes_as_long_as_the_bytes_need() -> None:
    started_s = monotonic()
    assert Throttle(1000).wait(50)
    assert monotonic() - started_s >= 0.05


def test_it_waits_no_longer_than_it_may() -> None:
    started_s = monotonic()
    assert not Throttle(1).wait(1000, started_s + 0.02)
    assert 0.02 <= monotonic() - started_s < 5


def test_without_a_limit_it_does_not_wait() -> None:
    assert Throttle().wait(10**15)


def test_a_negative_speed_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        Throttle(-1)
