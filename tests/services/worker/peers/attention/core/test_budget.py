"""A creditor lends a share of its time, not more, and all of it while it has nothing to do."""

from hypothesis import given
from hypothesis import strategies as st

from services.worker.peers.attention.core.cost import ComputeBudget


def test_a_busy_worker_lends_its_fraction() -> None:
    budget, now_s, lent_s = ComputeBudget(0.25, burst_s=0.1), 0.0, 0.0
    while now_s < 100:
        if budget.may_compute(now_s, is_busy=True):
            budget.on_computed(0.02, is_busy=True)
            lent_s += 0.02
        now_s += 0.01
    assert 0.24 < lent_s / 100 < 0.26
    assert budget.refusals > 0


def test_an_idle_worker_lends_what_is_asked() -> None:
    budget = ComputeBudget(0.01)
    for step in range(100):
        assert budget.may_compute(step * 0.01, is_busy=False)
        budget.on_computed(0.01, is_busy=False)
    assert budget.refusals == 0


def test_a_fraction_of_none_lends_nothing_even_when_idle() -> None:
    assert not ComputeBudget(0.0).may_compute(0.0, is_busy=False)


@given(
    st.floats(0.05, 1.0),
    st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 0.2), st.booleans()), max_size=60),
)
def test_never_more_than_fraction_burst_and_one_question(
    fraction: float, events: list[tuple[float, float, bool]]
) -> None:
    budget, now_s, lent_s, longest_s = ComputeBudget(fraction, burst_s=0.1), 0.0, 0.0, 0.0
    for pause_s, compute_s, is_busy in events:
        now_s += pause_s
        if budget.may_compute(now_s, is_busy=is_busy):
            budget.on_computed(compute_s, is_busy=is_busy)
            lent_s += compute_s if is_busy else 0.0
            longest_s = max(longest_s, compute_s)
        budget.check_integrity()
        assert lent_s <= fraction * now_s + 0.1 + longest_s + 1e-9
