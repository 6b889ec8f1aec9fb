"""Work that waits where nothing moves is said to, and nothing else is taken for it."""

from dataclasses import replace

from services.scheduler.core.long_waits import ANYWHERE, STANDSTILL_S
from services.scheduler.policy.contract import PlannedBatch
from services.scheduler.policy.first_come import VllmPolicy
from tests.services.scheduler.world import SMALL, small_world
from tests.stack.world import World


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
    assert all(request.over for request in others)
    assert len(notes(world)) == 1 and ANYWHERE in notes(world)[0]
