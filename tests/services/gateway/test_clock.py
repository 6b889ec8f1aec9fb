"""Time in which nobody could listen does not count."""

import pytest

from services.gateway.clock import AttentiveClock


class Hands:
    """A clock, and a bus, to set by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.is_listening = True

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def hands() -> Hands:
    return Hands()


@pytest.fixture
def clock(hands: Hands) -> AttentiveClock:
    return AttentiveClock(hands, lambda: hands.is_listening, longest_gap_s=1.0, longest_pause_s=20.0)


def passed(hands: Hands, clock: AttentiveClock, seconds: float) -> float:
    """What the clock makes of so many seconds, read twice a second."""
    began_s = clock()
    for _ in range(int(seconds * 2)):
        hands.now_s += 0.5
        clock()
    return clock() - began_s


def test_it_runs_as_long_as_somebody_looks(hands: Hands, clock: AttentiveClock) -> None:
    assert passed(hands, clock, 10) == 10


def test_a_gap_counts_as_nothing_and_it_never_goes_back(hands: Hands, clock: AttentiveClock) -> None:
    seen = [clock()]
    for step_s in (0.5, 30.0, 0.5, 5.0, 1.0):
        hands.now_s += step_s
        seen.append(clock())
    assert seen == sorted(seen)
    assert seen[-1] - seen[0] == 2.0


def test_off_the_bus_it_stands_still_but_not_for_ever(hands: Hands, clock: AttentiveClock) -> None:
    hands.is_listening = False
    assert passed(hands, clock, 15) == 0
    hands.is_listening = True
    assert passed(hands, clock, 5) == 5
    hands.is_listening = False
    assert passed(hands, clock, 30) == 10
