"""Workers that die, freeze, wake, hang or misreport, and schedulers that are replaced: every sequence ends
once.

Who serves what the others serve, who does not, and what becomes of those.
"""

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.fleet import mismatch, prevailing
from services.scheduler.core.rules import Rules
from services.scheduler.policy import BUILT_IN
from shared.errors import InternalError, ModelMismatch
from shared.messages.reports import SequenceState, WorkerReported
from tests.services.scheduler.world import SMALL, Chaos, World
from tests.shared.messages.builders import worker_report

Arrivals = list[tuple[int, int, int, float]]


"""(prompt tokens, natural answer tokens, max tokens, when)"""


Breakages = list[tuple[float, str, int]]


"""(when, what, a number that says which and how long)"""


every_policy = pytest.mark.parametrize("policy", sorted(BUILT_IN))


arrivals_of = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 70), st.integers(1, 60), st.floats(0, 2)),
    min_size=1,
    max_size=14,
)


breakages_of = st.lists(
    st.tuples(
        st.floats(0.1, 6),
        st.sampled_from(
            [
                "kill worker",
                "freeze worker",
                "blink worker",
                "restart scheduler",
                "restart scheduler with another policy",
                "cancel",
            ]
        ),
        st.integers(0, 99),
    ),
    max_size=5,
)


def start_if_gone(world: World, name: str) -> None:
    if name not in world.workers:
        world.start_worker(name)


def lead_if_nobody_does(world: World) -> None:
    if world.core is None:
        world.start_scheduler()


def break_something(world: World, what: str, number: int) -> None:
    names = sorted(world.workers)
    if what == "kill worker" and names:
        name = names[number % len(names)]
        world.kill_worker(name)
        world.time.after(number % 4, partial(start_if_gone, world, name))
    elif what in ("freeze worker", "blink worker") and names:
        name = names[number % len(names)]
        world.freeze_worker(name)
        frozen_s = 3.0 + number % 5 if what == "freeze worker" else 0.02 * (number % 50)
        world.time.after(frozen_s, partial(world.wake_worker, name))
    elif what.startswith("restart scheduler"):
        world.kill_scheduler()
        if what.endswith("another policy"):
            world.make_policy = BUILT_IN[sorted(BUILT_IN)[number % len(BUILT_IN)]]
        world.time.after(0.05 * (number % 40), partial(lead_if_nobody_does, world))
    elif what == "cancel" and world.requests:
        request = list(world.requests.values())[number % len(world.requests)]
        if not request.over:
            world.cancel(request)


def play(seed: int, arrivals: Arrivals, broken: Breakages, **kinds: Any) -> World:
    """Let it all happen; then every answer is whole, said to be over once, and nothing is left anywhere."""
    world = World(seed, **kinds)
    for number, (prompt, answer, limit, at_s) in enumerate(arrivals):
        world.time.at(at_s, partial(world.submit, f"r{number}", prompt, answer, limit))
    for at_s, what, number in broken:
        world.time.at(at_s, partial(break_something, world, what, number))
    world.time.run_for(8.0)
    world.run_until(lambda: not world.unfinished(), limit_s=120.0)
    for request in world.requests.values():
        if not request.cancelled:
            assert request.refused is None, request.refused
            assert len(request.ends) == 1 and request.tokens == request.expected
    world.time.run_for(6.0)
    for worker in world.workers.values():
        assert worker.used_blocks == 0, "blocks of sequences that are over"
    assert world.core is not None
    assert (world.core.queued, world.core.running) == (0, 0)
    return world


@every_policy
@settings(max_examples=35, deadline=None)
@given(
    seed=st.integers(0, 2**16), arrivals=arrivals_of, broken=breakages_of, blocks=st.sampled_from([28, 64])
)
def test_whatever_dies_every_sequence_ends_once(
    policy: str, seed: int, arrivals: Arrivals, broken: Breakages, blocks: int
) -> None:
    play(seed, arrivals, broken, total_blocks=blocks, make_policy=BUILT_IN[policy])


@every_policy
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16), arrivals=arrivals_of, broken=breakages_of)
def test_lost_messages_lose_no_sequence(
    policy: str, seed: int, arrivals: Arrivals, broken: Breakages
) -> None:
    chaos = Chaos(lost_reports=0.02, lost_plans=0.02, lost_frames=0.02, silent_placement=0.2)
    play(seed, arrivals, broken, total_blocks=40, chaos=chaos, make_policy=BUILT_IN[policy])


def test_a_scheduler_with_another_policy_goes_on_with_what_runs() -> None:
    world = World(workers=1, total_blocks=28, make_policy=BUILT_IN["vllm"])
    requests = [world.submit(f"r{number}", 10, 60, 60) for number in range(4)]
    world.run_until(lambda: all(len(request.tokens) > 4 for request in requests), limit_s=3.0)
    maximum_blocks = -(-(10 + 60 - 1) // 4)
    assert maximum_blocks < 28 < 2 * maximum_blocks, "orca would have started one of the four"
    world.kill_scheduler()
    world.make_policy = BUILT_IN["orca"]
    world.start_scheduler()
    world.run_until(lambda: not world.unfinished(), limit_s=20.0)
    assert all(request.tokens == request.expected and request.attempt == 1 for request in requests)


def test_a_killed_workers_sequences_are_resubmitted_and_unsent_ones_are_placed_again() -> None:
    world = World(workers=1, total_blocks=16)
    requests = [world.submit(f"r{number}", 20, 20, 20) for number in range(4)]
    world.run_until(lambda: len(requests[0].tokens) > 4, limit_s=3.0)
    assert requests[-1].tokens == [], "there is no room for all of them"
    world.kill_worker("worker-0")
    world.run_until(lambda: bool(world.lines("PublishWorkerLost")), limit_s=4.0)
    world.start_worker("worker-1")
    world.run_until(lambda: not world.unfinished(), limit_s=20.0)
    assert requests[0].attempt == 2 and requests[-1].attempt == 1
    assert all(request.tokens == request.expected for request in requests)


def test_a_restarted_worker_is_lost_at_its_first_heartbeat() -> None:
    world = World(workers=1)
    request = world.submit("a", 4, 50, 50)
    world.run_until(lambda: len(request.tokens) > 4, limit_s=3.0)
    died_s = world.now_s
    world.kill_worker("worker-0")
    world.start_worker("worker-0")
    world.run_until(lambda: request.attempt == 2, limit_s=1.0)
    assert world.now_s - died_s < world.rules.worker_timeout_s
    world.run_until(lambda: request.over, limit_s=4.0)
    assert request.tokens == request.expected


def test_a_frozen_worker_that_wakes_is_told_to_drop_what_moved() -> None:
    world = World(workers=2)
    requests = [world.submit(f"r{number}", 4, 60, 60) for number in range(6)]
    world.run_until(lambda: all(len(request.tokens) > 4 for request in requests), limit_s=3.0)
    world.freeze_worker("worker-0")
    world.run_until(lambda: not world.unfinished(), limit_s=20.0)
    world.wake_worker("worker-0")
    world.time.run_for(2.0)
    assert world.workers["worker-0"].used_blocks == 0
    assert all(request.tokens == request.expected for request in requests)


def test_a_worker_that_answers_no_snapshot_is_lost_although_its_heart_beats() -> None:
    world = World(workers=1, rules=Rules(settings=SMALL.settings, round_s=0.3, snapshot_patience_s=3.0))
    request = world.submit("a", 4, 60, 60)
    world.run_until(lambda: len(request.tokens) > 4, limit_s=3.0)
    world.kill_scheduler()
    world.workers["worker-0"].is_mute = True
    world.start_scheduler()
    world.time.run_for(5.0)
    assert len(world.lines("AskSnapshot")) > 2 and len(world.lines("PublishWorkerLost")) == 1
    world.workers["worker-0"].is_mute = False
    world.run_until(lambda: request.over, limit_s=12.0)
    assert request.tokens == request.expected


def test_a_plan_that_is_lost_is_noticed_and_made_again() -> None:
    world = World(workers=1)
    world.run_until(lambda: bool(world.lines("AskSnapshot")), limit_s=2.0)
    world.chaos.lost_plans = 1.0
    request = world.submit("a", 4, 10, 10)
    world.time.run_for(0.6)
    world.chaos.lost_plans = 0.0
    world.run_until(lambda: request.over, limit_s=3.0)
    assert any("never reached" in line for line in world.lines("AskSnapshot"))


def test_the_schedulers_own_pause_blames_nobody() -> None:
    world = World(workers=1)
    request = world.submit("a", prompt_tokens=4, answer_tokens=60, max_tokens=60)
    world.run_until(lambda: len(request.tokens) > 4, limit_s=2.0)
    core, world.core = world.core, None
    world.time.run_for(4.0)
    world.core = core
    world.run_until(lambda: request.over, limit_s=8.0)
    assert not any("PublishWorkerLost" in line for line in world.log)
    assert request.attempt == 1 and request.tokens == request.expected


def test_a_sequence_that_breaks_every_plan_is_given_up_and_the_rest_goes_on() -> None:
    world = World(workers=1)
    world.workers["worker-0"].refused = {"bad"}
    bad = world.submit("bad", 5, 20, 20)
    good = [world.submit(f"r{number}", 5, 20, 20) for number in range(4)]
    world.run_until(lambda: all(request.over for request in good), limit_s=10.0)
    assert all(request.tokens == request.expected for request in good)
    world.run_until(lambda: bad.over, limit_s=10.0)
    assert isinstance(bad.refused, InternalError) and "worker-0" in bad.refused.message
    world.time.run_for(1.0)
    assert world.workers["worker-0"].used_blocks == 0


def test_what_a_worker_holds_unbeknown_to_us_is_found_and_settled() -> None:
    world = World(workers=1)
    cancelled = world.submit("a", 4, 60, 60)
    world.run_until(lambda: len(cancelled.tokens) > 4, limit_s=3.0)
    worker = world.workers["worker-0"]
    stray = worker.held[cancelled.key]
    world.cancel(cancelled)
    world.time.run_for(0.5)
    assert worker.held == {}
    worker.held[cancelled.key] = stray
    stray.state, stray.blocks, stray.computed = SequenceState.DECODING, 3, len(stray.tokens) - 1
    world.gateway.on_worker_reported = lambda report, now_s: None  # type: ignore[method-assign]
    world.time.run_for(2.5)
    assert worker.held == {}
    assert any("not known to be there" in line for line in world.lines("AskSnapshot"))


def test_a_plan_too_large_to_send_costs_the_sequence_that_makes_it_so() -> None:
    world = World(workers=1)
    world.too_long_for_the_bus = 30
    long = world.submit("long", 40, 5, 5)
    short = [world.submit(f"r{number}", 10, 5, 5) for number in range(4)]
    world.run_until(lambda: all(request.over for request in short), limit_s=4.0)
    assert all(request.tokens == request.expected for request in short)
    world.run_until(lambda: long.over, limit_s=5.0)
    assert isinstance(long.refused, InternalError) and "was not sent" in long.refused.message


OTHER = "22" * 16


def report(worker_id: str, model: str = "m", weights: str = "aa") -> WorkerReported:
    return worker_report(worker_id, model=model, weights=weights)


def test_equal_names_and_weights_match_and_weights_not_told_match_any() -> None:
    assert mismatch(report("b"), []) is None
    assert mismatch(report("b"), [report("a")]) is None
    assert mismatch(report("b", weights=""), [report("a")]) is None


@pytest.mark.parametrize(
    ("fields", "says", "param"),
    [
        ({"weights": "bb"}, r"b and a both serve 'm'.*bb.*aa", "model"),
        ({"model": "n"}, "'n'.*'m'", "served_name"),
    ],
)
def test_other_weights_or_another_name_are_said_with_what_to_do(
    fields: dict[str, Any], says: str, param: str
) -> None:
    error = mismatch(report("b", **fields), [report("a")])
    assert isinstance(error, ModelMismatch) and error.param == param
    with pytest.raises(ModelMismatch, match=says):
        raise error


def test_what_most_serve_prevails_and_of_two_the_first() -> None:
    reports = [report("c"), report("b"), report("a", weights="bb")]
    assert (found := prevailing(reports)) is not None and found.weights == "aa"
    assert (found := prevailing(reports[1:])) is not None and found.worker_id == "a"
    assert prevailing([]) is None


def refused(world: World) -> dict[str, str]:
    """By worker, why."""
    assert world.core is not None
    return {row["worker"]: row["refused"] for row in world.core.describe()["workers"] if row.get("refused")}


def test_a_worker_with_other_weights_gets_no_work_until_the_others_are_gone() -> None:
    world = World(workers=2)
    world.start_worker("worker-9", weights=OTHER)
    requests = [world.submit(f"r{number}", 10, 20, 20) for number in range(8)]
    world.run_until(lambda: not world.unfinished(), limit_s=10.0)
    assert all(request.tokens == request.expected for request in requests)
    assert world.workers["worker-9"].step_tokens == []
    assert "different weights" in refused(world)["worker-9"]
    assert len(world.lines("RefuseWorker")) == 1, "said once, not at every heartbeat"
    for name in ("worker-0", "worker-1"):
        world.kill_worker(name)
    late = world.submit("late", 10, 20, 20)
    world.run_until(lambda: late.over, limit_s=10.0)
    assert late.tokens == late.expected and refused(world) == {}
    assert world.workers["worker-9"].step_tokens


def test_a_new_scheduler_sides_with_most_and_what_the_others_hold_is_resumed_elsewhere() -> None:
    world = World(workers=0)
    world.start_worker("worker-0", weights=OTHER)
    world.run_until(lambda: bool(world.lines("AskSnapshot")), limit_s=2.0)
    request = world.submit("a", 10, 60, 60)
    world.run_until(lambda: len(request.tokens) > 4, limit_s=3.0)
    world.kill_scheduler()
    world.start_worker("worker-1")
    world.start_worker("worker-2")
    world.start_scheduler()
    world.run_until(lambda: request.over, limit_s=15.0)
    assert set(refused(world)) == {"worker-0"}
    assert request.attempt == 2 and request.tokens == request.expected
