"""The roster: sequences come, move and go in one place."""

from services.scheduler.core.effects import CancelAtWorker, SequenceLeft, WantKvAtWorker
from services.scheduler.core.roster import Roster
from services.scheduler.core.rules import Rules
from services.scheduler.core.sequence import Phase, Sequence
from services.scheduler.core.worker_pipeline import WorkerPipeline
from services.scheduler.policy.contract import WorkerShape
from services.scheduler.policy.first_come import VllmPolicy
from shared.messages.reports import Capacity
from shared.messages.sequence import FinishReason, Sampling, SequenceRef, SequenceSpec, pack_tokens
from tests.shared.messages.builders import worker_report


def sequence(name: str = "a") -> Sequence:
    spec = SequenceSpec(
        ref=SequenceRef(request_id=name, choice=0, attempt=1),
        gateway_id="gateway-0",
        gateway_incarnation=1,
        prompt=pack_tokens([7] * 4),
        sampling=Sampling(seed=1, max_tokens=20),
    )
    return Sequence.from_spec(spec, 0.0)


def roster_with_pipeline() -> tuple[Roster, WorkerPipeline]:
    roster = Roster(Rules())
    report = worker_report(
        block_tokens=4, max_context_tokens=80, capacity=Capacity(total_blocks=20, free_blocks=20)
    )
    pipeline = WorkerPipeline("worker-0", 1, 1, roster.rules, roster.sequences, report, 0.0)
    roster.pipelines["worker-0"] = pipeline
    assert roster.closed_workers() == ("worker-0",)
    pipeline.begin(VllmPolicy(WorkerShape(4, 20), roster.rules.settings), report, 0.0)
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
    assert roster.tombstones.get(("a", 0), 1.0) == roster.tombstones.get(("b", 0), 1.0) == 1
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


def test_memories_fade() -> None:
    roster, _ = roster_with_pipeline()
    roster.lost_workers.put("worker-9", 1, 0.0)
    roster.tombstones.put(("a", 0), 1, 0.0)
    assert roster.closed_workers() == ("worker-9",)
    roster.expire(100.0)
    assert roster.closed_workers() == () and len(roster.tombstones) == 0


def test_a_worker_is_told_of_what_its_own_kv_cannot_hold() -> None:
    roster, pipeline = roster_with_pipeline()
    short, long = sequence("short"), sequence("long")
    long.max_tokens = 90
    for item in (short, long):
        roster.add(item)
        roster.place(item, pipeline, 0.0)
    assert roster.wanted() == [WantKvAtWorker("worker-0", 96)], "whole blocks"
    roster.leave(long, Phase.CANCELLED, 0.0)
    assert roster.wanted() == []
