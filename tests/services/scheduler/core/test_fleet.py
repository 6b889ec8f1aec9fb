"""Workers that die, freeze, wake, hang or misreport, and schedulers that are replaced: every sequence ends
once.

Who serves what the others serve, who does not, and what becomes of those.
"""

from typing import Any

import pytest

from services.scheduler.core.effects import SendPlan
from services.scheduler.core.fleet import mismatch
from services.scheduler.core.rules import Rules
from services.scheduler.policy import BUILT_IN
from shared.errors import InternalError, ModelMismatch
from shared.messages.reports import WorkerReported
from tests.services.scheduler.world import SMALL, small_world, started
from tests.shared.messages.builders import worker_report
from tests.stack.world import World


def test_a_scheduler_with_another_policy_goes_on_with_what_runs() -> None:
    world = small_world(workers=1, kv_blocks=28, policy=BUILT_IN["vllm"])
    requests = [world.ask_for(f"r{number}", 10, 60, 60) for number in range(4)]
    world.until(lambda: all(len(request.tokens) > 4 for request in requests), limit_s=3.0)
    maximum_blocks = -(-(10 + 60 - 1) // 4)
    assert maximum_blocks < 28 < 2 * maximum_blocks, "orca would have started one of the four"
    world.kill(world.scheduler)
    world.policy = BUILT_IN["orca"]
    world.start_scheduler()
    world.until(lambda: not world.unfinished(), limit_s=20.0)
    assert all(request.tokens == request.expected and request.attempt == 1 for request in requests)


def test_a_killed_workers_sequences_are_resubmitted_and_unsent_ones_are_placed_again() -> None:
    world = small_world(workers=1, kv_blocks=16)
    requests = [world.ask_for(f"r{number}", 20, 20, 20) for number in range(4)]
    world.until(lambda: len(requests[0].tokens) > 4, limit_s=3.0)
    assert requests[-1].tokens == [], "there is no room for all of them"
    world.kill(world.workers["worker-0"])
    world.until(lambda: bool(world.lines("PublishWorkerLost")), limit_s=4.0)
    world.start_worker("worker-1")
    world.until(lambda: not world.unfinished(), limit_s=20.0)
    assert requests[0].attempt == 2 and requests[-1].attempt == 1
    assert all(request.tokens == request.expected for request in requests)


def test_a_restarted_worker_is_lost_at_its_first_heartbeat() -> None:
    world, request = started(answer_tokens=50)
    died_s = world.now_s
    world.kill(world.workers["worker-0"])
    world.start_worker("worker-0")
    world.until(lambda: request.attempt == 2, limit_s=1.0)
    assert world.now_s - died_s < world.rules.worker_timeout_s
    world.until(lambda: request.over, limit_s=4.0)
    assert request.tokens == request.expected


def test_a_frozen_worker_that_wakes_is_told_to_drop_what_moved() -> None:
    world = small_world(workers=2)
    requests = [world.ask_for(f"r{number}", 4, 60, 60) for number in range(6)]
    world.until(lambda: all(len(request.tokens) > 4 for request in requests), limit_s=3.0)
    world.freeze(world.workers["worker-0"])
    world.until(lambda: not world.unfinished(), limit_s=20.0)
    world.wake(world.workers["worker-0"])
    world.run_for(2.0)
    assert world.workers["worker-0"].used_blocks == 0
    assert all(request.tokens == request.expected for request in requests)


def test_a_worker_that_answers_no_snapshot_is_lost_although_its_heart_beats() -> None:
    world, request = started(rules=Rules(settings=SMALL.settings, round_s=0.3, snapshot_patience_s=3.0))
    world.kill(world.scheduler)
    world.workers["worker-0"].is_mute = True
    world.start_scheduler()
    world.run_for(5.0)
    assert len(world.lines("AskSnapshot")) > 2 and len(world.lines("PublishWorkerLost")) == 1
    world.workers["worker-0"].is_mute = False
    world.until(lambda: request.over, limit_s=12.0)
    assert request.tokens == request.expected


def test_a_plan_that_is_lost_is_noticed_and_made_again() -> None:
    world = small_world(workers=1)
    world.until(lambda: bool(world.lines("AskSnapshot")), limit_s=2.0)
    world.is_lost = lambda effect: isinstance(effect, SendPlan)
    request = world.ask_for("a", 4, 10, 10)
    world.run_for(0.6)
    world.is_lost = lambda _: False
    world.until(lambda: request.over, limit_s=3.0)
    assert any("never reached" in line for line in world.lines("AskSnapshot"))


def test_the_schedulers_own_pause_blames_nobody() -> None:
    world, request = started()
    world.freeze(world.scheduler, 4.0)
    world.until(lambda: request.over, limit_s=8.0)
    assert not world.lines("PublishWorkerLost")
    assert request.attempt == 1 and request.tokens == request.expected


def test_a_sequence_that_breaks_every_plan_is_given_up_and_the_rest_goes_on() -> None:
    world = small_world(workers=1)
    world.skipped = {"bad"}
    bad = world.ask_for("bad", 5, 20, 20)
    good = [world.ask_for(f"r{number}", 5, 20, 20) for number in range(4)]
    world.until(lambda: all(request.over for request in good), limit_s=10.0)
    assert all(request.tokens == request.expected for request in good)
    world.until(lambda: bad.over, limit_s=10.0)
    assert isinstance(bad.refused, InternalError) and "worker-0" in bad.refused.message
    world.run_for(1.0)
    assert world.workers["worker-0"].used_blocks == 0


def test_who_lacks_blocks_that_others_have_waits_for_them() -> None:
    """While a worker says what it has just lent, or given back. It was given up after five plans."""
    world = small_world(workers=1)
    held = [world.ask_for(f"r{number}", 60, 60, 60) for number in range(2)]
    world.until(lambda: all(len(request.tokens) > 5 for request in held), limit_s=5.0)
    world.workers["worker-0"].says = {"total_blocks": 128, "free_blocks": 40}
    late = world.ask_for("late", 120, 4, 60)
    world.until(lambda: sum("no_blocks" in line for line in world.lines("AskSnapshot")) > 6, limit_s=5.0)
    assert late.refused is None
    world.workers["worker-0"].says = {}
    world.until(lambda: not world.unfinished(), limit_s=20.0)
    assert all(request.tokens == request.expected for request in (*held, late))


def test_what_a_worker_lists_unbeknown_to_us_is_found_and_dropped() -> None:
    world, cancelled = started()
    worker = world.workers["worker-0"]
    stray = worker.core.report(world.now_s).sequences
    world.cancel(cancelled)
    world.run_for(0.5)
    assert worker.held == {}
    worker.says["sequences"] = stray
    world.run_for(2.5)
    assert any("not known to be there" in line for line in world.lines("AskSnapshot"))
    assert "drops=(SequenceRef(request_id='a'" in world.lines("SendPlan")[-1]


def test_a_plan_too_large_to_send_costs_the_sequence_that_makes_it_so() -> None:
    world = small_world(workers=1)
    world.too_long_for_the_bus = 30
    long = world.ask_for("long", 40, 5, 5)
    short = [world.ask_for(f"r{number}", 10, 5, 5) for number in range(4)]
    world.until(lambda: all(request.over for request in short), limit_s=4.0)
    assert all(request.tokens == request.expected for request in short)
    world.until(lambda: long.over, limit_s=5.0)
    assert isinstance(long.refused, InternalError) and "was not sent" in long.refused.message


OTHER = "22" * 16


def report(worker_id: str, model: str = "m", weights: str = "aa") -> WorkerReported:
    return worker_report(worker_id, model=model, weights=weights)


def test_equal_names_and_weights_match_and_weights_not_told_match_any() -> None:
    assert mismatch(report("b"), []) is None and mismatch(report("b"), [report("a")]) is None
    assert mismatch(report("b", weights=""), [report("a")]) is None


@pytest.mark.parametrize(
    ("fields", "says", "param"),
    [
        ({"weights": "bb"}, r"b and a both serve 'm'.*bb.*aa", "model"),
        ({"model": "n"}, "'n'.*'m'", "served_name"),
    ],
)
def test_other_weights_or_names_are_said_with_advice(fields: dict[str, Any], says: str, param: str) -> None:
    error = mismatch(report("b", **fields), [report("a")])
    assert isinstance(error, ModelMismatch) and error.param == param
    with pytest.raises(ModelMismatch, match=says):
        raise error


def refused(world: World) -> dict[str, str]:
    """By worker, why."""
    return {row["worker"]: row["refused"] for row in world.core.describe()["workers"] if row.get("refused")}


def test_a_worker_with_other_weights_gets_no_work_until_the_others_are_gone() -> None:
    world = small_world(workers=2)
    world.start_worker("worker-9", weights=OTHER)
    requests = [world.ask_for(f"r{number}", 10, 20, 20) for number in range(8)]
    world.until(lambda: not world.unfinished(), limit_s=10.0)
    assert all(request.tokens == request.expected for request in requests)
    assert world.workers["worker-9"].step_tokens == [] and "different weights" in refused(world)["worker-9"]
    assert len(world.lines("RefuseWorker")) == 1, "said once, not at every heartbeat"
    for name in ("worker-0", "worker-1"):
        world.kill(world.workers[name])
    late = world.ask_for("late", 10, 20, 20)
    world.until(lambda: late.over, limit_s=10.0)
    assert late.tokens == late.expected and refused(world) == {} and world.workers["worker-9"].step_tokens


def test_a_new_scheduler_sides_with_most_and_what_the_others_hold_is_resumed_elsewhere() -> None:
    world = small_world(workers=0)
    world.start_worker("worker-0", weights=OTHER)
    world.until(lambda: bool(world.lines("AskSnapshot")), limit_s=2.0)
    request = world.ask_for("a", 10, 60, 60)
    world.until(lambda: len(request.tokens) > 4, limit_s=3.0)
    world.kill(world.scheduler)
    world.start_worker("worker-1")
    world.start_worker("worker-2")
    world.start_scheduler()
    world.until(lambda: request.over, limit_s=15.0)
    assert set(refused(world)) == {"worker-0"} and request.attempt == 2 and request.tokens == request.expected
