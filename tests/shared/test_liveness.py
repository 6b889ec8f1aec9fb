"""Who is there: heard lately, in time in which this process could listen, and by its present start.

Keeps from coming back: incarnations that were the time of day, so that a gateway started again after the
clock was set back was refused for good; and a process that was stopped and took everybody for lost.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.liveness import SILENCE_S, AwakeClock, AwakeTime, Incarnations, Liveness

EVENTS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 5), st.floats(0, SILENCE_S)), max_size=40)


def test_a_new_start_replaces_the_one_before_whatever_its_number() -> None:
    for first, second in ((1, 2), (2, 1), (2**62, 1)):
        heard = Incarnations()
        assert heard.hear("gateway-0", first, 0.0) and heard.hear("gateway-0", second, 0.1)
        assert heard.present("gateway-0") == second
        assert not heard.hear("gateway-0", first, 0.2), "frozen, and woken up"


def test_one_that_was_replaced_may_come_back_when_its_successor_is_silent() -> None:
    heard = Incarnations()
    heard.hear("worker-0", 1, 0.0)
    heard.hear("worker-0", 2, 1.0)
    assert not heard.hear("worker-0", 1, 1.0 + SILENCE_S)
    assert heard.is_replaced("worker-0", 1, 1.0 + SILENCE_S)
    assert not heard.is_replaced("worker-0", 1, 1.1 + SILENCE_S)
    assert heard.hear("worker-0", 1, 1.1 + SILENCE_S) and not heard.hear("worker-0", 2, 2.0 + SILENCE_S)


def test_what_is_remembered_is_bounded() -> None:
    heard = Incarnations()
    for number in range(20_000):
        assert heard.hear("worker-0", number, 0.0)
        assert heard.hear(f"worker-{number}", 1, 0.0) or number == 0
    assert heard.present("worker-1") is None and heard.present("worker-19999") == 1


@given(EVENTS)
def test_whoever_goes_on_speaking_alone_is_heard(events: list[tuple[str, int, float]]) -> None:
    """Whatever came before, a start that alone is heard is the present one after a silence at the latest."""
    heard, now_s = Incarnations(), 0.0
    for instance, incarnation, after_s in events:
        now_s += after_s
        was_listened_to = heard.hear(instance, incarnation, now_s)
        assert was_listened_to == (heard.present(instance) == incarnation)
    for instance, incarnation in {(instance, incarnation) for instance, incarnation, _ in events}:
        now_s += 2 * SILENCE_S
        assert heard.hear(instance, incarnation, now_s)


def test_who_is_silent_is_named_once_and_comes_back_when_it_speaks() -> None:
    liveness = Liveness(2.0)
    assert liveness.hear("worker-0", 1, 0.0) and liveness.hear("worker-1", 1, 1.0)
    assert liveness.silent(2.0) == [] and "worker-0" in liveness
    assert liveness.silent(2.5) == ["worker-0"] and liveness.silent(2.6) == []
    assert list(liveness) == ["worker-1"] and liveness.unheard_s("worker-1", 2.6) == 1.6
    assert liveness.present("worker-0") is None
    assert liveness.hear("worker-0", 1, 2.7) and liveness.present("worker-0") == 1
    liveness.forget("worker-0")
    assert "worker-0" not in liveness and liveness.silent(99.0) == ["worker-1"]


def test_one_that_is_expected_has_to_show_itself() -> None:
    liveness = Liveness(2.0)
    assert liveness.expect("gateway-0", None, 0.0) and liveness.expect("gateway-1", 5, 0.0)
    assert liveness.present("gateway-0") is None, "nobody has said which start"
    liveness.hear("gateway-1", 6, 1.0)
    assert liveness.silent(2.5) == ["gateway-0"]
    liveness.hear("gateway-1", 5, 2.6)
    assert not liveness.expect("gateway-1", 6, 2.7), "it was replaced"
    assert liveness.expect("gateway-1", 5, 2.7)


def test_one_that_nobody_here_has_heard_of_is_expected_whoever_was_heard_before() -> None:
    """A gateway was started anew while a worker was cut off. Until its next heartbeat the worker refused what
    schedulers sent in its name, five times, and clients got an error."""
    liveness = Liveness(2.0)
    liveness.hear("gateway-0", 1, 0.0)
    assert liveness.expect("gateway-0", 2, 0.5)
    assert liveness.hear("gateway-0", 2, 0.6) and not liveness.expect("gateway-0", 1, 0.7)


class Hands:
    """A clock, and a bus, to set by hand."""

    def __init__(self) -> None:
        self.now_s, self.is_listening = 100.0, True

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def hands() -> Hands:
    return Hands()


@pytest.fixture
def clock(hands: Hands) -> AwakeClock:
    return AwakeClock(hands, lambda: hands.is_listening)


def passed(hands: Hands, clock: AwakeClock, seconds: float) -> float:
    """What the clock makes of so many seconds, read twice a second."""
    began_s = clock()
    for _ in range(int(seconds * 2)):
        hands.now_s += 0.5
        clock()
    return clock() - began_s


def test_the_clock_runs_as_long_as_somebody_looks(hands: Hands, clock: AwakeClock) -> None:
    assert passed(hands, clock, 10) == 10


def test_a_gap_counts_as_nothing_and_the_clock_never_goes_back(hands: Hands, clock: AwakeClock) -> None:
    seen = [clock()]
    for step_s in (0.5, 30.0, 0.5, 5.0, 1.0):
        hands.now_s += step_s
        seen.append(clock())
    assert seen == sorted(seen) and seen[-1] - seen[0] == 2.0


def test_off_the_bus_the_clock_stands_still_but_not_for_ever(hands: Hands, clock: AwakeClock) -> None:
    hands.is_listening = False
    assert passed(hands, clock, 15) == 0
    hands.is_listening = True
    assert passed(hands, clock, 5) == 5
    hands.is_listening = False
    assert passed(hands, clock, 30) == 10


def test_nobody_was_silent_while_this_process_was_stopped() -> None:
    liveness, awake = Liveness(10.0), AwakeTime(longest_gap_s=5.0)
    liveness.hear("gateway-0", 1, awake.at(0.0))
    assert liveness.silent(awake.at(5.0)) == [] and liveness.silent(awake.at(100.0)) == []
    assert liveness.silent(awake.at(104.0)) == [] and liveness.silent(awake.at(107.0)) == ["gateway-0"]


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=20))
def test_time_awake_never_goes_back_nor_ahead_of_the_clock(looks_s: list[float]) -> None:
    """Looks may come out of order: messages are stamped when they arrive."""
    awake = AwakeTime()
    seen = [awake.at(now_s) for now_s in looks_s]
    assert seen == sorted(seen) and all(looks_s[0] <= awake_s <= max(looks_s) + 1e-6 for awake_s in seen)
