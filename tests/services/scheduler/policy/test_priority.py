"""Whoever waits with a lower priority goes first, in the fleet's queue and under every policy that ships."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy import BUILT_IN
from services.scheduler.policy.contract import BY_WORK, PolicySettings, QueueRule, Task
from services.scheduler.policy.fleet_queue import FleetQueue
from tests.services.scheduler.policy.batch_rig import rig, truth
from tests.shared.messages.builders import predicted

every_policy = pytest.mark.parametrize("name", sorted(BUILT_IN))
priorities_of = st.lists(st.integers(-3, 3), min_size=2, max_size=12)


@every_policy
@settings(max_examples=40, deadline=None)
@given(priorities=priorities_of, slots=st.integers(1, 4), predicts=st.booleans(), lag=st.integers(0, 2))
def test_of_equals_the_lower_starts_first(
    name: str, priorities: list[int], slots: int, predicts: bool, lag: int
) -> None:
    """And of one priority whoever came first."""
    limits = PolicySettings(max_batch_sequences=slots, token_budget=32)
    bench = rig(BUILT_IN[name], limits, blocks=40, lag=lag)
    if predicts:
        bench.predict = truth
    for number, priority in enumerate(priorities):
        bench.now_s += 0.001
        bench.arrive(f"r{number:02}", 12, 10, 10, priority=priority)
    bench.finish()
    numbers = [int(key[0][1:]) for key in bench.started]
    assert numbers == sorted(range(len(priorities)), key=lambda at: (priorities[at], at))


@every_policy
@given(sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=3, max_size=8))
@settings(max_examples=25, deadline=None)
def test_one_that_came_last_passes_all_that_wait(name: str, sizes: list[tuple[int, int]]) -> None:
    """However long the others are, or late: one place, and it is the next to have it."""
    limits = PolicySettings(max_batch_sequences=1, token_budget=32)
    bench = rig(BUILT_IN[name], limits, blocks=40, lag=0)
    bench.predict = truth
    for number, (prompt, answer) in enumerate(sizes):
        bench.arrive(f"r{number:02}", prompt, answer, answer, priority=5)
    bench.turn()
    before = len(bench.started)
    bench.now_s += 1e4
    bench.arrive("urgent", 30, 30, 30, priority=-1)
    bench.finish()
    assert bench.started.index(("urgent", 0)) <= before


@pytest.mark.parametrize("rule", [BY_WORK, QueueRule()])
@settings(deadline=None)
@given(
    waiting=st.lists(
        st.tuples(st.integers(-3, 3), st.integers(1, 500), st.integers(1, 500)), min_size=1, max_size=30
    )
)
def test_the_fleets_queue_goes_by_priority_first(
    rule: QueueRule, waiting: list[tuple[int, int, int]]
) -> None:
    """Whatever work they are, and however much may pass; ranks, which are compared with those of workers,
    say the same."""
    queue = FleetQueue(rule)
    for number, (priority, prompt, answer) in enumerate(waiting):
        queue.add(Task((f"r{number}", 0), prompt, 500, float(number), priority=priority))
        queue.on_predicted((f"r{number}", 0), predicted(answer))
    ranks = []
    went = []
    while len(queue):
        key = queue.next(1)[0]
        ranks.append(queue.start(key))
        went.append(waiting[int(key[0][1:])][0])
    assert went == sorted(went)
    assert [rank[0] for rank in ranks] == went
