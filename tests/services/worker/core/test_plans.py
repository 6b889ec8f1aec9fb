"""Which plan runs next, and what becomes of the others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.core.plans import MAX_PLANS, PlanQueue
from shared.messages.plans import StepOutcome
from tests.shared.messages.builders import plan

EXPIRED, STALE, SUPERSEDED = StepOutcome.EXPIRED, StepOutcome.STALE_EPOCH, StepOutcome.SUPERSEDED


def seqs_in_order(queue: PlanQueue, now_s: float = 0.0) -> list[int]:
    seqs = []
    while (head := queue.head(now_s)[0]) is not None:
        seqs.append(head.plan.seq)
        queue.finish_head()
    return seqs


def test_an_epoch_far_beyond_the_one_obeyed_is_ignored() -> None:
    """Keeps one plan with an epoch of 2^62 from making a worker refuse all schedulers to come."""
    queue = PlanQueue()
    assert queue.offer(plan(1, epoch=7), 0.0) == []
    assert queue.offer(plan(1, epoch=2**62), 0.0) == []
    assert queue.epoch == 7 and len(queue) == 1
    assert not queue.may_follow(2**62) and queue.may_follow(10**9)
    assert PlanQueue().may_follow(2**62), "a worker that has just started knows no epoch"


@pytest.mark.parametrize(
    ("offers", "given_up", "epoch", "run"),
    [
        pytest.param([(1, 1), (1, 2), (1, 3)], [], 1, [1, 2, 3], id="in order"),
        pytest.param([(1, 1), (1, 1), (1, 2), (1, 2)], [], 1, [1, 2], id="twice"),
        pytest.param([(1, 1), (1, 3)], [(1, 2, EXPIRED)], 1, [1, 3], id="one is lost"),
        pytest.param(
            [(1, 1), (1, 2), (1, 3), (1, 1)],
            [(1, seq, SUPERSEDED) for seq in (1, 2, 3)],
            1,
            [1],
            id="number one starts the numbering again",
        ),
        pytest.param([(5, 1), (4, 2)], [(4, 2, STALE)], 5, [1], id="an older epoch is refused"),
        pytest.param([(5, 1), (6, 1)], [(5, 1, STALE)], 6, [1], id="a higher epoch replaces what waits"),
    ],
)
def test_which_plans_run_and_what_is_said_of_the_others(
    offers: list[tuple[int, int]], given_up: list[tuple[int, int, StepOutcome]], epoch: int, run: list[int]
) -> None:
    """Plans as (epoch, number)."""
    queue = PlanQueue()
    told = [up for epoch, seq in offers for up in queue.offer(plan(seq, epoch=epoch), 0.0)]
    assert [(up.epoch, up.seq, up.outcome) for up in told] == given_up
    assert all(up.steps_done == 0 for up in told)
    assert queue.epoch == epoch and seqs_in_order(queue) == run


def test_an_expired_plan_is_given_up_even_halfway() -> None:
    queue = PlanQueue()
    queue.offer(plan(1, steps=4, valid_for_s=2.0), 10.0)
    queue.offer(plan(2, valid_for_s=9.0), 10.0)
    head, _ = queue.head(12.0)
    assert head is not None and head.plan.seq == 1
    head.steps_done = 1
    following, expired = queue.head(12.5)
    assert [(up.seq, up.steps_done, up.outcome) for up in expired] == [(1, 1, StepOutcome.EXPIRED)]
    assert following is not None and following.plan.seq == 2


def test_a_superseding_plan_cuts_earlier_ones_short() -> None:
    queue = PlanQueue()
    queue.offer(plan(1, steps=9), 0.0)
    queue.offer(plan(2), 0.0)
    head, _ = queue.head(0.0)
    assert head is not None
    head.steps_done = 3
    given_up = queue.offer(plan(3, supersedes=True), 0.0)
    assert [(up.seq, up.steps_done) for up in given_up] == [(1, 3), (2, 0)]
    assert {up.outcome for up in given_up} == {StepOutcome.SUPERSEDED}
    assert seqs_in_order(queue) == [3]


def test_the_queue_is_bounded() -> None:
    queue = PlanQueue()
    given_up = [queue.offer(plan(seq), 0.0) for seq in range(1, MAX_PLANS + 3)]
    assert [up.seq for ups in given_up for up in ups] == [MAX_PLANS + 1, MAX_PLANS + 2]
    queue.check_integrity()


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.booleans(), st.floats(0, 3)),
        max_size=40,
    ),
    st.lists(st.sampled_from(["step", "reset", "nothing"]), max_size=40),
)
def test_every_plan_is_run_or_given_up_or_ignored_once(
    offers: list[tuple[int, int, int, bool, float]], actions: list[str]
) -> None:
    queue = PlanQueue()
    now_s = 0.0
    epoch = 0
    for index, (plan_epoch, seq, steps, supersedes, wait_s) in enumerate(offers):
        now_s += wait_s
        offered = plan(seq, epoch=plan_epoch, steps=steps, supersedes=supersedes)
        waiting = len(queue)
        given_up = queue.offer(offered, now_s)
        queue.check_integrity()
        assert queue.epoch >= epoch
        epoch = queue.epoch
        assert all(up.outcome is not StepOutcome.RAN for up in given_up)
        assert len(queue) <= waiting + 1
        if plan_epoch < epoch:
            assert len(queue) == waiting and given_up[0].outcome is StepOutcome.STALE_EPOCH
        action = actions[index % len(actions)] if actions else "nothing"
        if action == "step":
            head, _ = queue.head(now_s)
            if head is not None:
                assert now_s - head.received_s <= head.plan.valid_for_s
                head.steps_done += 1
                if head.over:
                    queue.finish_head()
        elif action == "reset":
            queue.reset(epoch)
            assert len(queue) == 0 and queue.last_seq == 0
        queue.check_integrity()
