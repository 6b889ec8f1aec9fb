"""Workers that shrink under what waits for them, and work that waits where nothing moves."""

from dataclasses import replace

import pytest

from services.gateway.core.stream import StreamTiming
from services.scheduler.core.long_waits import ANYWHERE, STANDSTILL_S
from services.scheduler.core.rules import OversizedRules, Rules
from services.scheduler.policy import BUILT_IN
from services.scheduler.policy.contract import PlannedBatch
from services.scheduler.policy.first_come import VllmPolicy
from shared.errors import ContextOverflow
from tests.services.scheduler.world import SMALL, small_world
from tests.stack.actors import Request
from tests.stack.world import World

RULES = Rules(
    settings=SMALL.settings, round_s=SMALL.round_s, oversized=OversizedRules(wait_s=2.0, gather_s=4.0)
)
BOUND_S = RULES.oversized.wait_s + 2 * StreamTiming().frame_timeout_s + 1.0
every_policy = pytest.mark.parametrize("policy", sorted(BUILT_IN))


def crowded(policy: str) -> tuple[World, Request]:
    """One worker of 64 blocks of 4, kept busy, and a long one that was placed on it and has not begun."""
    world = small_world(rules=RULES, workers=1, policy=BUILT_IN[policy])
    world.run_for(1.0)
    world.core._roster.feed._places = 99  # else it may wait in the queue, where nothing is lost
    for number in range(8):
        world.ask_for(f"r{number}", prompt_tokens=30, answer_tokens=400, max_tokens=60)
    world.run_for(0.03)
    long = world.ask_for("long", prompt_tokens=150, answer_tokens=90, max_tokens=90)
    world.run_for(0.002)
    world.until(lambda: not world.core.describe().get("queued"), limit_s=1.0)
    assert not long.tokens and not long.over
    return world, long


def shrink(world: World) -> None:
    """34 blocks are about to go: still given out to plans on their way, and not reported as lasting."""
    world.workers["worker-0"].says |= {"doomed_blocks": 34, "max_context_tokens": 30 * 4}


def is_answered(request: Request) -> bool:
    return request.over or request.refused is not None


@every_policy
def test_one_that_no_worker_can_hold_any_more_is_refused_within_the_bound(policy: str) -> None:
    """It waited for ever: it had been placed, and nobody looked again at whether it could run."""
    world, long = crowded(policy)
    shrink(world)
    world.until(lambda: is_answered(long), limit_s=BOUND_S)
    assert isinstance(long.refused, ContextOverflow)
    world.until(lambda: not [key for key in world.unfinished() if key != long.key], limit_s=20.0)


@every_policy
def test_one_that_another_worker_can_hold_runs_there_within_the_bound(policy: str) -> None:
    world, long = crowded(policy)
    shrink(world)
    world.start_worker("worker-1")
    world.until(lambda: len(long.tokens) > 0, limit_s=BOUND_S)
    assert world.worker_of(long) == "worker-1"
    world.until(lambda: not world.unfinished(), limit_s=20.0)
    assert long.tokens == long.expected


@pytest.mark.parametrize("others", [0, 1])
@every_policy
def test_one_that_lost_its_blocks_to_the_shrinking_is_answered_too(policy: str, others: int) -> None:
    """It had begun: its worker has its tokens, and no room for their KV."""
    world = small_world(rules=RULES, workers=1, policy=BUILT_IN[policy])
    world.run_for(1.0)
    long = world.ask_for("long", prompt_tokens=150, answer_tokens=90, max_tokens=90)
    world.until(lambda: len(long.tokens) > 5, limit_s=5.0)
    for number in range(others):
        world.start_worker(f"worker-{number + 1}")
    shrink(world)
    world.until(lambda: is_answered(long), limit_s=3 * BOUND_S)
    if others:
        assert long.tokens == long.expected
    else:
        assert isinstance(long.refused, ContextOverflow)


@every_policy
def test_a_worker_that_grows_again_in_time_serves_what_waited(policy: str) -> None:
    world, long = crowded(policy)
    shrink(world)
    world.run_for(RULES.oversized.wait_s / 2)
    world.workers["worker-0"].says = {}
    world.until(lambda: not world.unfinished(), limit_s=30.0)
    assert long.tokens == long.expected and long.refused is None


def test_a_queued_one_that_fits_nowhere_is_refused_within_the_bound() -> None:
    world = small_world(rules=RULES, workers=0)
    request = world.ask_for("a", prompt_tokens=300, answer_tokens=5, max_tokens=5)
    world.run_for(0.5)
    world.start_worker("worker-0")
    other = world.ask_for("b", prompt_tokens=4, answer_tokens=5, max_tokens=5)
    world.until(lambda: other.over and request.over, limit_s=BOUND_S)
    assert isinstance(request.refused, ContextOverflow)


@pytest.mark.parametrize("grows", [True, False])
def test_one_that_had_begun_waits_in_the_queue_for_its_worker_to_grow_again(grows: bool) -> None:
    """It was refused in the middle of its answer, as a new one is that nobody can hold."""
    world = small_world(rules=RULES, workers=1)
    world.run_for(1.0)
    long = world.ask_for("long", prompt_tokens=150, answer_tokens=90, max_tokens=90)
    world.until(lambda: len(long.tokens) > 5, limit_s=5.0)
    world.start_worker("worker-0", doomed_blocks=34, max_context_tokens=30 * 4)
    world.until(lambda: world.core.describe().get("queued") == 1, limit_s=BOUND_S)
    world.run_for(RULES.oversized.wait_s / 2)
    assert not is_answered(long)
    if grows:
        world.workers["worker-0"].says = {}
        world.until(lambda: not world.unfinished(), limit_s=30.0)
        assert long.tokens == long.expected
    else:
        world.until(lambda: is_answered(long), limit_s=BOUND_S)
        assert isinstance(long.refused, ContextOverflow)


class Refuser(VllmPolicy):
    """Plans nothing for prompts of 7 tokens, as one whose books are wrong would."""

    def plan(self, now_s: float) -> PlannedBatch | None:
        return None if any(job.task.prompt_tokens == 7 for job in self._waiting) else super().plan(now_s)


def standstill_s(world: World) -> float:
    assert world.core.describe()["standstill_s"] == round(world.core.standstill_s, 1)
    return world.core.standstill_s


def notes(world: World) -> list[str]:
    return world.lines("NoteStandstill")


def test_nothing_planned_for_what_waits_is_said_once_a_minute_and_over_when_it_moves() -> None:
    world = small_world(workers=1, policy=Refuser)
    world.run_for(60.0)
    request = world.ask_for("a", prompt_tokens=7, answer_tokens=4, max_tokens=4)
    world.run_for(STANDSTILL_S - 2.0)
    assert standstill_s(world) == 0 and not notes(world)
    world.run_for(4.0)
    assert STANDSTILL_S <= standstill_s(world) < STANDSTILL_S + 3.0
    assert len(notes(world)) == 1 and "worker-0" in notes(world)[0] and "waiting=1" in notes(world)[0]
    world.run_for(57.0)
    assert len(notes(world)) == 1
    world.run_for(5.0)
    assert len(notes(world)) == 2
    world.cancel(request)
    world.run_for(2.0)
    assert standstill_s(world) == 0


def test_a_worker_stands_still_beside_one_that_works() -> None:
    world = small_world(workers=2, policy=Refuser)
    world.run_for(1.0)
    stuck = world.ask_for("stuck", prompt_tokens=7, answer_tokens=4, max_tokens=4)
    world.run_for(1.0)
    core = world.core
    pipeline = core._roster.pipelines[core._roster.sequences[stuck.key].worker_id or ""]
    for number in range(20):
        world.ask_for(f"r{number}", prompt_tokens=4, answer_tokens=30, max_tokens=30)
        world.run_for(1.0)
    assert standstill_s(world) > 0 and all(pipeline.worker_id in note for note in notes(world))


def test_slow_steps_and_an_idle_stack_are_no_standstill() -> None:
    world = small_world(workers=1, step_s=4.0)
    world.run_for(100.0)
    request = world.ask_for("a", prompt_tokens=4, answer_tokens=10, max_tokens=10)
    world.until(lambda: request.over, limit_s=100.0)
    world.run_for(100.0)
    assert not notes(world)


def test_what_needs_other_workers_memory_waits_for_all_of_them() -> None:
    """Its own worker has nothing to do until memory is lent: that is no standstill while others work."""
    world = small_world(workers=2, rules=replace(SMALL, worker_timeout_s=5.0), kv_blocks=16)
    for worker in world.workers.values():
        worker.says |= {"max_context_tokens": 64 + 1000}
    world.run_for(1.0)
    long = world.ask_for("long", prompt_tokens=100, answer_tokens=4, max_tokens=4)
    others = [world.ask_for(f"r{n}", prompt_tokens=4, answer_tokens=30, max_tokens=30) for n in range(4)]
    for number in range(25):
        others.append(world.ask_for(f"s{number}", prompt_tokens=4, answer_tokens=30, max_tokens=30))
        world.run_for(1.0)
    assert not long.tokens and not notes(world)
    world.run_for(STANDSTILL_S + 5.0)
    assert all(request.over for request in others) and len(notes(world)) == 1 and ANYWHERE in notes(world)[0]
