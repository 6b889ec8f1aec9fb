"""Waits between restarts."""

from hypothesis import given
from hypothesis import strategies as st

from services.stack.children import Backoff


def test_first_restart_is_quick_and_then_they_double() -> None:
    backoff = Backoff()
    assert [round(backoff.on_exit(0.5), 3) for _ in range(9)] == [
        0.1,
        0.2,
        0.4,
        0.8,
        1.6,
        3.2,
        6.4,
        10.0,
        10.0,
    ]


def test_a_stable_life_starts_over() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.on_exit(0.0)
    assert backoff.on_exit(10.0) == 0.1
    assert backoff.failures == 1


@given(lives=st.lists(st.floats(0, 100), min_size=1, max_size=200))
def test_waits_stay_within_bounds_and_never_fall_without_a_stable_life(lives: list[float]) -> None:
    backoff, before = Backoff(), 0.0
    for lived_s in lives:
        delay_s = backoff.on_exit(lived_s)
        assert 0.1 <= delay_s <= 10.0
        assert delay_s >= before or lived_s >= backoff.stable_s
        before = delay_s
