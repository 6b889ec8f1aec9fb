"""Adoption: what a snapshot lists, and what the scheduler knew, become one picture."""

import msgspec
import pytest

from services.scheduler.core.effects import AskPrediction, Effect, SendPlan
from services.scheduler.core.fleet import Fleet, adopt_snapshot
from services.scheduler.core.intake import Intake
from services.scheduler.core.roster import Roster
from services.scheduler.core.rules import Rules
from services.scheduler.core.sequence import Phase
from services.scheduler.core.worker_pipeline import Sync
from services.scheduler.policy.first_come import VllmPolicy
from shared.errors import ForeignSequence, InternalError
from shared.messages.reports import Capacity, GatewayReported, SequenceReport, SequenceState, WorkerReported
from shared.messages.sequence import SequenceRef
from tests.services.scheduler.core.builders import sequence
from tests.services.scheduler.world import small_world
from tests.shared.messages.builders import ref, sequence_report, spec, worker_report


def snapshot(worker_id: str, *listed: SequenceReport) -> WorkerReported:
    free_blocks = 100 - sum(item.allocated_blocks for item in listed)
    return worker_report(
        worker_id,
        stepped_seq=9,
        block_tokens=4,
        max_context_tokens=400,
        total_blocks=100,
        free_blocks=free_blocks,
        sequences=listed,
    )


def listed(
    name: str, state: SequenceState = SequenceState.DECODING, attempt: int = 1, gateway_id: str = "gateway-0"
) -> SequenceReport:
    return sequence_report(
        ref(name, attempt),
        state,
        gateway_id=gateway_id,
        prompt_tokens=4,
        generated_tokens=3 if state is SequenceState.DECODING else 0,
        computed_tokens=6 if state is SequenceState.DECODING else 0,
        max_tokens=20,
        allocated_blocks=2 if state is SequenceState.DECODING else 0,
    )


class Desk:
    """A roster with two pipelines that have been asked for their snapshots."""

    def __init__(self) -> None:
        self.roster = Roster(Rules())
        for worker_id in ("worker-0", "worker-1"):
            pipeline = self.roster.welcome(snapshot(worker_id), 1, 0.0)
            pipeline.lose_step(0.0)
            self.roster.pipelines[worker_id] = pipeline

    def adopt(self, worker_id: str, *reports: SequenceReport) -> list[Effect]:
        pipeline = self.roster.pipelines[worker_id]
        effects = adopt_snapshot(self.roster, pipeline, snapshot(worker_id, *reports), VllmPolicy, 1.0)
        self.roster.check_integrity()
        assert pipeline.sync is Sync.IN_STEP
        return effects

    def drops(self, worker_id: str) -> set[SequenceRef]:
        plans = self.roster.pipelines[worker_id].next_plans(1.0)
        return {ref for effect in plans if isinstance(effect, SendPlan) for ref in effect.plan.drops}


def test_what_was_adopted_is_filled_in_by_its_gateway_once_and_is_of_that_start_from_then_on() -> None:
    desk = Desk()
    desk.adopt("worker-0", listed("a"), listed("b", attempt=2))
    intake, known = Intake(desk.roster), desk.roster.sequences
    told = spec(ref("a"), [7] * 4, max_tokens=20, gateway_incarnation=1)
    admission, effects = intake.on_submit(told, 2.0)
    assert (admission.known, admission.worker_id) == (True, "worker-0")
    assert [type(effect) for effect in effects] == [AskPrediction] and known["a", 0].spec is told
    assert intake.on_submit(told, 2.0)[1] == [], "nothing is missing any more"
    earlier = spec(ref("b"), [7] * 4, max_tokens=20, gateway_incarnation=1)
    assert intake.on_submit(earlier, 2.0)[1] == [] and known["b", 0].spec is None, "of another attempt"
    intake.on_gateway_reported(GatewayReported(gateway_id="gateway-0", incarnation=2), 3.0)
    assert known.keys() == {("b", 0)}, "that start of it is gone; nobody knows of which start b is"


def test_what_nobody_knew_is_adopted_and_runs_on() -> None:
    desk = Desk()
    desk.adopt("worker-0", listed("a"), listed("b", SequenceState.WAITING))
    assert {s.key[0]: s.phase for s in desk.roster.sequences.values()} == {
        "a": Phase.DECODING,
        "b": Phase.WAITING,
    }
    plan = next(
        effect for effect in desk.roster.pipelines["worker-0"].next_plans(1.0) if isinstance(effect, SendPlan)
    )
    assert [item.ref.request_id for item in plan.plan.decodes] == ["a"]
    assert [(item.ref.request_id, item.first_token) for item in plan.plan.prefills] == [("b", 0)]
    assert plan.plan.starts == () and plan.plan.seq == 1


def test_blocks_that_two_share_are_not_capacity_twice() -> None:
    desk = Desk()
    pipeline = desk.roster.pipelines["worker-0"]
    shared = snapshot("worker-0", listed("a"), listed("b"))
    capacity = Capacity(total_blocks=100, free_blocks=90, evictable_blocks=8)
    adopt_snapshot(desk.roster, pipeline, msgspec.structs.replace(shared, capacity=capacity), VllmPolicy, 1.0)
    assert pipeline.policy is not None and isinstance(pipeline.policy.inner, VllmPolicy)
    assert pipeline.policy.inner._table.capacity_blocks == 100


def test_a_queued_attempt_that_lives_there_leaves_the_backlog() -> None:
    desk = Desk()
    desk.roster.add(sequence("a"))
    desk.adopt("worker-0", listed("a"))
    assert len(desk.roster.backlog) == 0
    assert desk.roster.sequences[("a", 0)].worker_id == "worker-0"


def test_an_older_attempt_is_dropped_and_a_newer_one_replaces_ours() -> None:
    desk = Desk()
    desk.roster.add(sequence("a", attempt=2))
    desk.roster.add(sequence("b"))
    desk.adopt("worker-0", listed("a", attempt=1), listed("b", attempt=2))
    assert desk.roster.sequences[("a", 0)].phase is Phase.QUEUED
    assert desk.roster.sequences[("b", 0)].ref.attempt == 2
    assert {ref.request_id for ref in desk.drops("worker-0")} == {"a"}


def test_one_attempt_lives_at_one_worker_only() -> None:
    desk = Desk()
    desk.adopt("worker-0", listed("a"))
    desk.adopt("worker-1", listed("a"))
    assert desk.roster.sequences[("a", 0)].worker_id == "worker-0"
    assert desk.drops("worker-0") == set()
    assert {ref.request_id for ref in desk.drops("worker-1")} == {"a"}


def test_a_cancelled_or_given_up_attempt_is_dropped() -> None:
    desk = Desk()
    desk.roster.tombstones.put("gateway-0", ref("a"), 0.0)
    desk.roster.dropped.put(("gateway-0", ("b", 0)), (1, InternalError("because")), 0.0)
    desk.adopt("worker-0", listed("a"), listed("b"))
    assert {ref.request_id for ref in desk.drops("worker-0")} == {"a", "b"}
    assert desk.roster.sequences == {}


@pytest.mark.parametrize("attempt", [1, 9])
@pytest.mark.parametrize("is_placed", [False, True])
def test_who_submitted_under_a_name_that_a_worker_knows_as_another_s_gives_way(
    attempt: int, is_placed: bool
) -> None:
    """Keeps a gateway that reads names in heartbeats from taking sequences over while a new scheduler has not
    heard yet whose they are."""
    desk = Desk()
    impostor = sequence("a", attempt=attempt, gateway_id="gateway-1")
    desk.roster.add(impostor)
    if is_placed:
        desk.adopt("worker-1")
        desk.roster.place(impostor, desk.roster.pipelines["worker-1"], 1.0)
        desk.roster.pipelines["worker-1"].next_plans(1.0)
    desk.adopt("worker-0", listed("a"))
    found = desk.roster.sequences[("a", 0)]
    assert (found.gateway_id, found.worker_id, found.ref.attempt) == ("gateway-0", "worker-0", 1)
    assert impostor.phase is Phase.DROPPED
    assert desk.drops("worker-0") == set()
    if is_placed:
        assert impostor.ref in desk.roster.pipelines["worker-1"]._drops
    with pytest.raises(ForeignSequence):
        Intake(desk.roster).on_submit(spec(ref("a", 9), [1, 2], gateway_id="gateway-1"), 1.0)


def test_a_heartbeat_says_whose_a_name_is_before_the_snapshot_does() -> None:
    desk = Desk()
    fleet = Fleet(desk.roster, VllmPolicy, 1)
    impostor = sequence("a", gateway_id="gateway-1")
    desk.roster.add(impostor)
    fleet.on_reported(snapshot("worker-0", listed("a"), listed("b", SequenceState.ENDED)), 1.0)
    assert impostor.phase is Phase.DROPPED and desk.roster.sequences == {}
    for name in ("a", "b"):
        with pytest.raises(ForeignSequence):
            Intake(desk.roster).on_submit(spec(ref(name, 9), [1, 2], gateway_id="gateway-1"), 1.0)
        assert not Intake(desk.roster).on_submit(spec(ref(name, 9), [1, 2]), 1.0)[0].known


def test_what_runs_is_not_taken_over_by_a_worker_s_word() -> None:
    desk = Desk()
    desk.adopt("worker-0", listed("a"))
    desk.adopt("worker-1", listed("a", attempt=9, gateway_id="gateway-1"))
    found = desk.roster.sequences[("a", 0)]
    assert (found.gateway_id, found.worker_id, found.ref.attempt) == ("gateway-0", "worker-0", 1)
    assert {ref.attempt for ref in desk.drops("worker-1")} == {9}


def test_what_ended_elsewhere_is_dropped() -> None:
    desk = Desk()
    desk.roster.ended.put(("a", 0), (1, "worker-1"), 0.0)
    desk.adopt("worker-0", listed("a"))
    assert {ref.request_id for ref in desk.drops("worker-0")} == {"a"}


def test_an_end_whose_report_was_lost_is_an_end() -> None:
    desk = Desk()
    desk.adopt("worker-0", listed("a"))
    desk.roster.pipelines["worker-0"].lose_step(1.0)
    effects = desk.adopt("worker-0", listed("a", SequenceState.ENDED))
    assert desk.roster.sequences == {} and len(effects) == 1
    assert desk.roster.ended.get(("a", 0), 1.0) == (1, "worker-0")


def test_a_start_that_never_arrived_is_placed_again_and_one_that_did_is_over() -> None:
    desk = Desk()
    desk.adopt("worker-0")
    pipeline = desk.roster.pipelines["worker-0"]
    for name in ("a", "b"):
        desk.roster.add(sequence(name))
        desk.roster.place(desk.roster.sequences[(name, 0)], pipeline, 1.0)
    pipeline.next_plans(1.0)
    assert {sequence.phase for sequence in desk.roster.sequences.values()} == {Phase.DECODING}
    desk.roster.sequences[("a", 0)].confirmed = True
    pipeline.lose_step(1.0)
    desk.adopt("worker-0")
    assert list(desk.roster.sequences) == [("b", 0)]
    assert desk.roster.sequences[("b", 0)].phase is Phase.PLACED
    plan = next(effect for effect in pipeline.next_plans(1.0) if isinstance(effect, SendPlan)).plan
    assert [spec.ref.request_id for spec in plan.starts] == ["b"]


def test_a_new_scheduler_adopts_what_runs() -> None:
    world = small_world(workers=1)
    requests = [world.ask_for(f"r{number}", 20, 50, 50) for number in range(3)]
    world.until(lambda: all(len(request.tokens) > 10 for request in requests), limit_s=5.0)
    prefilled = sum(tokens for tokens, _ in world.workers["worker-0"].step_tokens)
    world.kill(world.scheduler)
    world.run_for(1.0)
    world.start_scheduler()
    world.until(lambda: not world.unfinished(), limit_s=10.0)
    assert sum(tokens for tokens, _ in world.workers["worker-0"].step_tokens) == prefilled == 60
    assert all(request.tokens == request.expected and request.attempt == 1 for request in requests)
