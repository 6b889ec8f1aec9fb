"""Memory that runs out on one worker while another has room: the ladder decides, and a sequence moves."""

from dataclasses import replace

import msgspec
import pytest

from services.scheduler.core.core import WANT_INTERVAL_S
from services.scheduler.core.effects import NoteRelief, WantKvAtWorker
from services.scheduler.core.moves import Moves
from services.scheduler.core.pressure import PressureWatch
from services.scheduler.core.roster import Roster
from services.scheduler.core.rules import ReliefRules, Rules
from services.scheduler.core.worker_pipeline import Preempting
from services.scheduler.policy.contract import PlannedPreemption
from services.scheduler.policy.relief import Rung
from shared.messages.plans import PreemptMode
from tests.services.scheduler.world import SMALL, small_world
from tests.shared.messages.builders import worker_report
from tests.stack.actors import Request, WorkerProcess
from tests.stack.world import World

ON = ReliefRules(enabled=True, interval_s=0.1)


def crowded(relief: ReliefRules) -> tuple[World, list[Request]]:
    """Six sequences on a worker that can hold four to their end, beside one that is empty."""
    world = small_world(rules=replace(SMALL, relief=relief), workers=1, cached=True)
    requests = [world.ask_for(f"r{number}", 20, 50, 60) for number in range(5)]
    world.until(lambda: all(len(request.tokens) > 1 for request in requests), limit_s=10)
    world.start_worker("worker-1")
    return world, requests


def measured(worker: WorkerProcess) -> None:
    """Speeds as a worker reports them."""
    worker.says |= {"prefill_tokens_per_s": 2000.0, "decode_step_s": 0.01}


def finish(world: World) -> None:
    world.until(lambda: not world.unfinished(), limit_s=30)
    for request in world.requests:
        assert request.tokens == request.expected


def preemptions(world: World) -> int:
    return sum("PreemptMode" in line for line in world.lines("SendPlan"))


def test_a_sequence_moves_to_the_worker_that_has_room() -> None:
    world, _ = crowded(ON)
    for worker in world.workers.values():
        measured(worker)
    finish(world)
    assert [moved.target for moved in world.moved if not moved.reason][:1] == ["worker-1"]
    assert world.core.describe()["relief_migrate"] >= 1
    notes = world.lines("NoteRelief")
    assert notes and "cost_s" in notes[0] and "by tokens" in notes[0]


def test_a_rung_that_is_switched_off_is_not_taken() -> None:
    world, _ = crowded(replace(ON, switched_off=frozenset({Rung.MIGRATE})))
    for worker in world.workers.values():
        measured(worker)
    finish(world)
    assert world.moved == [] and preemptions(world) > 0 and "relief_migrate" not in world.core.describe()


def test_switched_off_altogether_nothing_is_decided() -> None:
    world, _ = crowded(ReliefRules())
    for worker in world.workers.values():
        measured(worker)
    finish(world)
    assert not world.lines(NoteRelief.__name__)


def crowded_and(lendable: int | None, growable: int, **also: float) -> World:
    """The worker that is full, and the other one, report this as well."""
    world, _ = crowded(ON)
    for worker in world.workers.values():
        measured(worker)
        worker.says |= {"lendable_blocks": lendable, "growable_blocks": growable, **also}
    finish(world)
    return world


def decided(world: World) -> dict[str, int]:
    return {key: count for key, count in world.core.describe().items() if key.startswith(("relief", "pree"))}


def test_borrowing_is_weighed_where_its_attention_was_measured() -> None:
    assert "relief_borrow" not in decided(crowded_and(40, 0))
    assert decided(crowded_and(40, 0, remote_block_s=1e-9))["relief_borrow"] >= 1
    dear = decided(crowded_and(40, 0, remote_block_s=1.0))
    assert dear["relief_migrate"] >= 1


def may_borrow(world: World) -> list[bool]:
    """As worker-0 was told."""
    return [
        effect.may_borrow_ahead
        for effect in world.effects
        if isinstance(effect, WantKvAtWorker) and effect.worker_id == "worker-0"
    ]


def test_a_worker_is_kept_from_borrowing_ahead_while_something_else_is_cheaper() -> None:
    assert may_borrow(crowded_and(40, 0)) == [], "what nobody has measured is not forbidden"
    assert may_borrow(crowded_and(40, 0, remote_block_s=1e-9)) == [], "nor what is cheapest"
    world = crowded_and(40, 0, remote_block_s=1.0)
    told = len(may_borrow(world))
    assert told and not any(may_borrow(world))
    world.run_for(10 * ON.hold_s)
    assert len(may_borrow(world)) - told <= ON.hold_s / WANT_INTERVAL_S + 1, "for a while only"


def test_a_worker_that_no_longer_gathers_is_told_at_once() -> None:
    """Else it keeps for two seconds what the next long sequence waits for, at a worker of its own."""
    roster = Roster(Rules())
    for name in ("worker-0", "worker-1"):
        roster.welcome(worker_report(name), 1, 0.0)
    watch = PressureWatch(roster, Moves(roster, roster.rules.moves), ReliefRules())
    first, second = WantKvAtWorker("worker-0", 96), WantKvAtWorker("worker-1", 96)
    done = WantKvAtWorker("worker-0", 0)
    assert watch.with_limits([first], 0.0) == [first] and watch.with_limits([second], 0.3) == [done, second]
    assert watch.with_limits([second], 0.6) == [second], "once is enough"
    del roster.pipelines["worker-1"]
    assert watch.with_limits([], 0.9) == [], "nobody to tell"


def test_nobody_borrows_ahead_where_the_rung_is_switched_off() -> None:
    world, _ = crowded(replace(ON, switched_off=frozenset({Rung.BORROW})))
    assert may_borrow(world) and not any(may_borrow(world))


def test_one_more_layer_on_the_host_is_weighed_where_its_stall_was_measured() -> None:
    assert "relief_expand" not in decided(crowded_and(None, 20))
    assert decided(crowded_and(None, 20, expand_stall_s=0.0))["relief_expand"] >= 1
    assert decided(crowded_and(None, 20, expand_stall_s=1.0))["relief_migrate"] >= 1, "where there is one"


def test_who_is_preempted_goes_to_the_host_where_that_is_faster() -> None:
    off = replace(ON, switched_off=frozenset({Rung.MIGRATE}))
    for host_block_s, mode in ((1e-5, "swap"), (1.0, "recompute")):
        world, _ = crowded(off)
        for worker in world.workers.values():
            measured(worker)
            worker.says |= {"host_block_s": host_block_s, "swap_room_blocks": 100}
        finish(world)
        counts = decided(world)
        assert counts[f"preempted_{mode}"] == preemptions(world) > 0, counts
        assert any("out and in again" in line for line in world.lines(NoteRelief.__name__))


REPORT = worker_report(
    free_blocks=0, prefill_tokens_per_s=1000.0, decode_step_s=0.01, host_block_s=0.001, swap_room_blocks=10
)
VICTIM = PlannedPreemption(("r", 0), held_blocks=6, computed_tokens=90)


def test_the_cheaper_way_is_taken_and_its_costs_are_told() -> None:
    mode, relief = Preempting().decide(REPORT, VICTIM, ON)
    assert mode is PreemptMode.SWAP and relief is not None
    assert {o.rung: round(o.cost_s, 3) for o in relief.offers} == {Rung.SWAP: 0.012, Rung.RECOMPUTE: 0.09}


@pytest.mark.parametrize(
    "changed",
    [
        {"host_block_s": 0.0},
        {"host_block_s": 0.02},
        {"prefill_tokens_per_s": 20_000.0},
        {"block_tokens": 100},
    ],
)
def test_what_is_slower_or_was_never_measured_is_not(changed: dict[str, float]) -> None:
    report = msgspec.structs.replace(REPORT, **changed)
    assert Preempting().decide(report, VICTIM, ON)[0] is PreemptMode.RECOMPUTE


def test_each_rung_can_be_switched_off_and_the_ladder_as_a_whole() -> None:
    off = ReliefRules(enabled=True, switched_off=frozenset({Rung.SWAP}))
    assert Preempting().decide(REPORT, VICTIM, off)[0] is PreemptMode.RECOMPUTE
    slow = msgspec.structs.replace(REPORT, host_block_s=1.0)
    off = ReliefRules(enabled=True, switched_off=frozenset({Rung.RECOMPUTE}))
    assert Preempting().decide(slow, VICTIM, off)[0] is PreemptMode.SWAP
    assert Preempting().decide(REPORT, VICTIM, ReliefRules()) == (PreemptMode.RECOMPUTE, None)


def test_the_host_is_not_promised_twice_between_two_heartbeats() -> None:
    preempting = Preempting()
    modes = [preempting.decide(REPORT, VICTIM, ON)[0] for _ in range(2)]
    assert modes == [PreemptMode.SWAP, PreemptMode.RECOMPUTE]
    preempting.swapped_blocks = 0  # a heartbeat
    assert preempting.decide(REPORT, VICTIM, ON)[0] is PreemptMode.SWAP
    assert preempting.counts == {PreemptMode.SWAP: 2, PreemptMode.RECOMPUTE: 1}
