"""How many workers should run: idle ones go after a while, one comes when somebody waits."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.placement.core.scaling import Scaling

FOUR = ["w0", "w1", "w2", "w3"]


def test_what_is_idle_for_long_is_parked_down_to_the_least() -> None:
    scaling = Scaling(least=2, linger_s=10)
    assert scaling.on_epoch(FOUR, ["w1", "w2", "w3"], 0, 0.0) == ([], [])
    assert scaling.on_epoch(FOUR, ["w1", "w3"], 0, 9.0) == ([], [])
    assert scaling.on_epoch(FOUR, ["w1", "w2", "w3"], 0, 10.0) == (["w3", "w1"], [])
    assert (scaling.wanted, scaling.parked) == (2, {"w1", "w3"})
    assert scaling.on_epoch(["w0", "w2"], ["w2"], 0, 99.0) == ([], [])
    assert scaling.parked == set()


def test_somebody_who_waits_gets_a_parked_worker_back_or_a_new_one() -> None:
    scaling = Scaling(linger_s=0, start_s=30, most=4)
    scaling.on_epoch(FOUR[:2], ["w1"], 0, 0.0)
    assert scaling.parked == {"w1"}
    assert scaling.on_epoch(FOUR[:2], [], 3, 1.0) == ([], ["w1"])
    assert scaling.on_epoch(FOUR[:2], [], 3, 2.0) == ([], []) and scaling.wanted == 3
    scaling.on_epoch(FOUR[:2], [], 3, 3.0)
    assert scaling.wanted == 3, "one start at a time"
    scaling.on_epoch(FOUR[:3], [], 1, 4.0)
    assert scaling.wanted == 4
    scaling.on_epoch(FOUR, [], 1, 5.0)
    assert scaling.wanted == 4, "no more than there may be"


def test_a_start_that_never_comes_is_asked_for_again() -> None:
    scaling = Scaling(start_s=30)
    scaling.on_epoch(["w0"], [], 1, 0.0)
    scaling.on_epoch(["w0"], [], 0, 1.0)
    assert scaling.wanted == 2, "it is on its way"
    scaling.on_epoch(["w0"], [], 0, 31.0)
    assert scaling.wanted == 1
    scaling.on_epoch(["w0"], [], 1, 32.0)
    assert scaling.wanted == 2


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sets(st.sampled_from(FOUR)), st.integers(0, 2), st.floats(0, 50)), max_size=40),
    st.integers(1, 3),
    st.integers(3, 5),
)
def test_never_below_the_least_nor_above_the_most(
    history: list[tuple[set[str], int, float]], least: int, most: int
) -> None:
    """Whoever obeys (stops what is parked, starts up to what is wanted) keeps within the bounds."""
    scaling = Scaling(least=least, most=most, linger_s=5, start_s=20)
    running, now_s = FOUR[:least], 0.0
    for idle, wanting, pause_s in history:
        now_s += pause_s
        parked, unparked = scaling.on_epoch(running, sorted(idle & set(running)), wanting, now_s)
        scaling.check_integrity()
        assert set(parked) <= idle & set(running) and not set(parked) & set(unparked)
        assert not wanting or not parked
        assert len(set(running) - scaling.parked) >= min(least, len(running))
        assert least <= scaling.wanted <= max(most, len(running))
        running = [name for name in running if name not in scaling.parked]
        while len(running) < min(scaling.wanted, len(FOUR)):
            running.append(next(name for name in FOUR if name not in running))
