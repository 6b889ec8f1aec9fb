"""The roster: sequences come, move and go in one place; their phases; who may borrow."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.effects import CancelAtWorker, SequenceLeft, WantKvAtWorker
from services.scheduler.core.guarded_policy import GuardedPolicy
from services.scheduler.core.long_waits import Claim, wanted, who_may_borrow
from services.scheduler.core.roster import Roster
from services.scheduler.core.rules import Rules
from services.scheduler.core.sequence import OVER, TRANSITIONS, Phase, Sequence
from services.scheduler.core.worker_pipeline import WorkerPipeline
from services.scheduler.policy.contract import WorkerShape
from services.scheduler.policy.first_come import VllmPolicy
from shared.errors import InternalError
from shared.messages.reports import Capacity
from shared.messages.sequence import FinishReason
from tests.services.scheduler.core.builders import sequence
from tests.shared.messages.builders import ref, spec, worker_report


def roster_with_pipeline() -> tuple[Roster, WorkerPipeline]:
    roster = Roster(Rules())
    report = worker_report(block_tokens=4, max_context_tokens=80, total_blocks=20, free_blocks=20)
    pipeline = roster.welcome(report, 1, 0.0)
    assert roster.closed_workers() == ("worker-0",)
    pipeline.begin(GuardedPolicy(VllmPolicy, WorkerShape(4, 20), roster.rules.settings), report, 0.0)
    return roster, pipeline


def test_from_the_backlog_to_a_worker_and_back() -> None:
    roster, pipeline = roster_with_pipeline()
    item = sequence()
    roster.add(item)
    roster.place(item, pipeline, 0.0)
    roster.check_integrity()
    assert (item.phase, item.worker_id, len(roster.backlog)) == (Phase.PLACED, "worker-0", 0)
    roster.take_back(item, 0.0)
    roster.check_integrity()
    assert (item.phase, item.worker_id, len(roster.backlog)) == (Phase.QUEUED, None, 1)
    assert pipeline.next_plans(0.0) == [], "its policy has forgotten it"


def test_a_cancel_reaches_the_worker_only_when_it_holds_the_sequence() -> None:
    roster, pipeline = roster_with_pipeline()
    for name in ("a", "b"):
        roster.add(sequence(name))
    roster.place(roster.sequences[("a", 0)], pipeline, 0.0)
    pipeline.next_plans(0.0)
    cancels = {
        name: roster.cancel(roster.sequences[(name, 0)], FinishReason.CANCELLED, 1.0) for name in ("a", "b")
    }
    assert [type(effect) for effect in cancels["a"]] == [SequenceLeft, CancelAtWorker]
    assert [type(effect) for effect in cancels["b"]] == [SequenceLeft]
    assert all(roster.tombstones.covers("gateway-0", ref(name), 1.0) for name in ("a", "b"))
    roster.check_integrity()


def test_what_leaves_says_how_long_it_waited_and_lived() -> None:
    roster, pipeline = roster_with_pipeline()
    item = sequence()
    roster.add(item)
    roster.place(item, pipeline, 1.0)
    pipeline.next_plans(2.0)
    left = roster.leave(item, Phase.ENDED, 5.0, reason=FinishReason.STOP, generated_tokens=3)
    assert (left.queued_s, left.total_s, left.generated_tokens) == (2.0, 5.0, 3)
    assert roster.ended.get(("a", 0), 5.0) == (1, "worker-0")
    assert roster.sequences == {}


def test_a_worker_is_told_of_what_its_own_kv_cannot_hold() -> None:
    roster, pipeline = roster_with_pipeline()
    short, long = sequence("short"), sequence("long")
    long.max_tokens = 90
    for item in (short, long):
        roster.add(item)
        roster.place(item, pipeline, 0.0)
    assert wanted(roster) == [WantKvAtWorker("worker-0", 96)], "whole blocks"
    roster.leave(long, Phase.CANCELLED, 0.0)
    assert wanted(roster) == []


OWN, MOST_LENT = 10, 8
workers = st.integers(2, 6)


def capacities(count: int, **fields: int) -> dict[str, Capacity]:
    whole = Capacity(total_blocks=OWN, free_blocks=OWN, most_lent_blocks=MOST_LENT)
    one = msgspec.structs.replace(whole, **fields)
    return {f"w{number}": one for number in range(count)}


def claim(age: int, worker: int, blocks: int) -> Claim:
    return Claim((0, float(age), (f"r{age}", 0)), f"w{worker}", blocks)


def test_those_that_fit_beside_each_other_go_together() -> None:
    both = [claim(1, 0, 17), claim(2, 1, 17)]
    assert who_may_borrow(both, capacities(4)) == both
    assert who_may_borrow(both, capacities(3)) == both[:1], "14 blocks missing, one lender of 8"


@pytest.mark.parametrize(
    ("fields", "own_blocks"),
    [({"total_blocks": 14, "borrowed_blocks": 5}, 9), ({"total_blocks": 9, "doomed_blocks": 2}, 7)],
)
def test_blocks_that_are_borrowed_or_about_to_go_are_not_a_workers_own(
    fields: dict[str, int], own_blocks: int
) -> None:
    capacity = msgspec.structs.replace(worker_report().capacity, **fields)
    report = msgspec.structs.replace(worker_report(), capacity=capacity)
    assert Roster(Rules()).welcome(report, 1, 0.0).own_blocks == own_blocks


@given(workers, st.lists(st.tuples(st.integers(0, 5), st.integers(1, 50)), min_size=1, max_size=12))
def test_the_oldest_is_served_and_others_leave_it_enough(count: int, asked: list[tuple[int, int]]) -> None:
    claims = [claim(age, worker % count, blocks) for age, (worker, blocks) in enumerate(asked)]
    chosen = who_may_borrow(reversed(claims), capacities(count))
    names = [one.worker_id for one in chosen]
    assert claims[0].worker_id in names and len(names) == len(set(names))
    assert all(one.blocks >= claims[0].blocks for one in chosen if one.worker_id == claims[0].worker_id)
    if chosen != claims[:1]:
        missing = sum(max(0, one.blocks - OWN) for one in chosen)
        assert missing <= MOST_LENT * (count - len(chosen))


def resumed() -> Sequence:
    told = spec(ref("a", 3, 2), [7] * 4, generated=[1, 2], max_tokens=20, waited_s=1.5, deadline_in_s=2.0)
    return Sequence.from_spec(told, 10.0)


def test_a_submitted_sequence_keeps_its_place_in_time() -> None:
    task = resumed().task()
    assert (task.arrival_s, task.deadline_s) == (8.5, 12.0)
    assert (task.prompt_tokens, task.generated_tokens, task.max_tokens) == (4, 2, 20)
    assert task.limit_tokens == 23 and resumed().limit_tokens == 24


def test_only_listed_transitions_are_legal() -> None:
    for old in Phase:
        for new in Phase:
            item = resumed()
            item.phase = old
            if old is new or (old, new) in TRANSITIONS:
                item.move_to(new)
                assert item.phase is new
            else:
                with pytest.raises(InternalError):
                    item.move_to(new)


def test_what_is_over_stays_over_and_everything_else_can_end() -> None:
    assert not any(old in OVER for old, _ in TRANSITIONS)
    for phase in set(Phase) - OVER:
        assert {new for old, new in TRANSITIONS if old is phase} >= OVER
