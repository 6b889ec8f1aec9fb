"""The roster: sequences come, move, go and are adopted in one place; their phases; who may borrow."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.effects import (
    AskPrediction,
    CancelAtWorker,
    Effect,
    NotePlaced,
    SendPlan,
    SequenceLeft,
    WantKvAtWorker,
)
from services.scheduler.core.fleet import Fleet, adopt_snapshot
from services.scheduler.core.intake import Intake
from services.scheduler.core.long_waits import Claim, wanted, who_may_borrow
from services.scheduler.core.roster import Roster
from services.scheduler.core.rules import Rules
from services.scheduler.core.sequence import OVER, TRANSITIONS, Phase, Sequence
from services.scheduler.core.sharing import Sharing
from services.scheduler.core.worker_pipeline import Sync, WorkerPipeline
from services.scheduler.policy.contract import GuardedPolicy, WorkerShape
from services.scheduler.policy.first_come import VllmPolicy
from shared.errors import ForeignSequence, InternalError
from shared.messages.reports import (
    Capacity,
    GatewayReported,
    SequenceReport,
    SequenceState,
    ShardLoad,
    WorkerReported,
)
from shared.messages.sequence import FinishReason, SequenceRef
from shared.shards import Shard
from tests.services.scheduler.core.builders import sequence
from tests.services.scheduler.world import small_world
from tests.shared.messages.builders import ref, sequence_report, spec, worker_report


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


def test_a_sequence_that_runs_alone_gets_an_idle_worker_and_keeps_it() -> None:
    roster, pipeline = roster_with_pipeline()
    second = roster.welcome(
        worker_report("worker-1", block_tokens=4, total_blocks=20, free_blocks=20), 1, 0.0
    )
    second.begin(GuardedPolicy(VllmPolicy, WorkerShape(4, 20), roster.rules.settings), second.report, 0.0)
    for name, at in (("a", pipeline), ("b", second)):
        roster.add(sequence(name))
        roster.place(roster.sequences[(name, 0)], at, 0.0)
    alone = Sequence.from_spec(spec(ref("alone"), [7] * 4, max_tokens=20, runs_alone=True), 0.0)
    roster.add(alone)
    roster.add(sequence("c"))
    question = roster.backlog.ask((), 0.0)
    assert question is not None and [item.ref for item in question.items] == [ref("c")]
    assert roster.seat_alone(1.0) == [] and not roster.reserved, "a worker may soon be idle"
    assert roster.seat_alone(3.0) == [] and list(roster.reserved) == ["worker-0"]
    assert roster.closed_workers() == ("worker-0",) and roster.pipeline_without_choice(alone) is None
    assert roster.least_loaded(sequence("d")) is second
    roster.leave(roster.sequences[("a", 0)], Phase.CANCELLED, 4.0)
    told = roster.seat_alone(4.0)
    assert alone.worker_id == "worker-0" and told[0] == NotePlaced(ref("alone"), "worker-0", "it runs alone")
    assert roster.seat_alone(5.0) == [] and list(roster.reserved) == ["worker-0"]
    roster.check_integrity()
    roster.leave(alone, Phase.CANCELLED, 6.0)
    roster.seat_alone(6.0)
    assert roster.closed_workers() == ()


def test_a_cancel_reaches_the_worker_only_when_it_holds_the_sequence() -> None:
    roster, pipeline = roster_with_pipeline()
    for name in ("a", "b"):
        roster.add(sequence(name))
    roster.place(roster.sequences[("a", 0)], pipeline, 0.0)
    pipeline.next_plans(0.0)
    cancels = {n: roster.cancel(roster.sequences[(n, 0)], FinishReason.CANCELLED, 1.0) for n in ("a", "b")}
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
    assert roster.ended.get(("a", 0), 5.0) == (1, "worker-0") and roster.sequences == {}


def test_a_worker_is_told_of_what_its_own_kv_cannot_hold() -> None:
    roster, pipeline = roster_with_pipeline()
    short, long = sequence("short"), sequence("long", max_tokens=90)
    for item in (short, long):
        roster.add(item)
        roster.place(item, pipeline, 0.0)
    assert wanted(roster) == [WantKvAtWorker("worker-0", 96)], "whole blocks"
    sharing = Sharing(roster, Shard(1, 3), 0.0)
    assert sharing.may_gather(2.0) and sharing.load(2.0).gathers_s == 2.0
    for shard, waited_s in ((0, 1.0), (2, 2.2)):
        sharing.on_load(shard, ShardLoad(gathers_s=waited_s), 2.0)
        assert sharing.may_gather(2.0), "a shorter wait, and one alike of a later shard"
    for shard, waited_s in ((0, 1.8), (2, 2.8)):
        sharing.on_load(shard, ShardLoad(gathers_s=waited_s), 2.0)
        assert not sharing.may_gather(2.0) and wanted(roster, may_gather=False) == []
        sharing.on_load(shard, ShardLoad(), 2.0)
    assert sharing.may_gather(2.0)
    roster.leave(long, Phase.CANCELLED, 0.0)
    assert wanted(roster) == [] and sharing.load(2.0).gathers_s == 0.0


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
def test_borrowed_or_doomed_blocks_are_not_a_workers_own(fields: dict[str, int], own_blocks: int) -> None:
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
    phases = {sequence.key[0]: sequence.phase for sequence in desk.roster.sequences.values()}
    assert phases == {"a": Phase.DECODING, "b": Phase.WAITING}
    plan = next(e for e in desk.roster.pipelines["worker-0"].next_plans(1.0) if isinstance(e, SendPlan))
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


@pytest.mark.parametrize(
    ("sized", "told", "found"),
    [(True, (256, 8192), (256, 8192)), (True, (0, 0), (64, 512)), (False, (256, 8192), (64, 512))],
)
def test_a_batch_is_as_large_as_the_workers_device_carries_unless_it_is_set(
    sized: bool, told: tuple[int, int], found: tuple[int, int]
) -> None:
    roster = Roster(Rules(sized_by_workers=sized))
    pipeline = roster.welcome(snapshot("worker-0"), 1, 0.0)
    report = msgspec.structs.replace(snapshot("worker-0"), batch_sequences=told[0], step_tokens=told[1])
    adopt_snapshot(roster, pipeline, report, VllmPolicy, 1.0)
    assert pipeline.policy is not None and isinstance(pipeline.policy.inner, VllmPolicy)
    settings = pipeline.policy.inner._settings
    assert (settings.max_batch_sequences, settings.token_budget) == found


def test_a_queued_attempt_that_lives_there_leaves_the_backlog() -> None:
    desk = Desk()
    desk.roster.add(sequence("a"))
    desk.adopt("worker-0", listed("a"))
    assert len(desk.roster.backlog) == 0 and desk.roster.sequences[("a", 0)].worker_id == "worker-0"


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
    assert desk.roster.sequences[("a", 0)].worker_id == "worker-0" and desk.drops("worker-0") == set()
    assert {ref.request_id for ref in desk.drops("worker-1")} == {"a"}


def test_a_cancelled_or_given_up_attempt_is_dropped() -> None:
    desk = Desk()
    desk.roster.tombstones.put("gateway-0", ref("a"), 0.0)
    desk.roster.dropped.put(("gateway-0", ("b", 0)), (1, InternalError("because")), 0.0)
    desk.adopt("worker-0", listed("a"), listed("b"))
    assert {ref.request_id for ref in desk.drops("worker-0")} == {"a", "b"} and desk.roster.sequences == {}


@pytest.mark.parametrize("attempt", [1, 9])
@pytest.mark.parametrize("is_placed", [False, True])
def test_who_submitted_under_a_name_that_is_another_s_at_a_worker_loses(
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
    assert impostor.phase is Phase.DROPPED and desk.drops("worker-0") == set()
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
    assert list(desk.roster.sequences) == [("b", 0)] and desk.roster.sequences[("b", 0)].phase is Phase.PLACED
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


def test_a_policy_learns_which_prompt_tokens_are_expected_to_be_cached() -> None:
    sequence = Sequence.from_spec(spec(ref("a"), [7] * 4), 0.0)
    assert sequence.task().cached_tokens == 0
    for expected, told in ((3, 3), (9, 4)):
        sequence.expected_tokens = expected
        assert sequence.task().cached_tokens == told
