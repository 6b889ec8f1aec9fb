"""Memory that runs out on one worker while another has room: the ladder decides, and a sequence moves."""

from dataclasses import replace

from services.scheduler.effects import NoteRelief
from services.scheduler.policy.relief import Rung
from services.scheduler.rules import ReliefRules, Rules
from tests.services.scheduler.fake_gateway import Request
from tests.services.scheduler.fake_worker import FakeWorker
from tests.services.scheduler.world import SMALL, World

ON = ReliefRules(enabled=True, interval_s=0.1)


def crowded(relief: ReliefRules) -> tuple[World, list[Request]]:
    """Six sequences on a worker that can hold four to their end, beside one that is empty."""
    world = World(rules=Rules(settings=SMALL.settings, round_s=SMALL.round_s, relief=relief), workers=1)
    world.fingerprint = b"same"
    requests = [world.submit(f"r{number}", 20, 50, 60) for number in range(5)]
    world.run_until(lambda: all(len(request.tokens) > 1 for request in requests), limit_s=10)
    world.start_worker("worker-1")
    return world, requests


def measured(worker: FakeWorker) -> None:
    """Speeds as a worker reports them."""
    worker.prefill_tokens_per_s, worker.decode_step_s = 2000.0, 0.01


def finish(world: World) -> None:
    world.run_until(lambda: not world.unfinished(), limit_s=30)
    for request in world.requests.values():
        assert request.tokens == request.expected


def preemptions(world: World) -> int:
    return sum("PreemptMode" in line for line in world.log)


def test_a_sequence_moves_to_the_worker_that_has_room() -> None:
    world, _ = crowded(ON)
    for worker in world.workers.values():
        measured(worker)
    finish(world)
    assert [moved.target for moved in world.moved if not moved.reason][:1] == ["worker-1"]
    assert world.core is not None
    assert world.core.describe()["relief_migrate"] >= 1
    notes = [line for line in world.log if line.startswith("NoteRelief")]
    assert notes and "cost_s" in notes[0] and "by tokens" in notes[0]


def test_a_rung_that_is_switched_off_is_not_taken() -> None:
    world, _ = crowded(replace(ON, switched_off=frozenset({Rung.MIGRATE})))
    for worker in world.workers.values():
        measured(worker)
    finish(world)
    assert world.moved == [] and preemptions(world) > 0
    assert world.core is not None and "relief_migrate" not in world.core.describe()


def test_switched_off_altogether_nothing_is_decided() -> None:
    world, _ = crowded(ReliefRules())
    for worker in world.workers.values():
        measured(worker)
    finish(world)
    assert not world.lines(NoteRelief.__name__)


def test_what_nobody_has_measured_is_not_counted_on() -> None:
    world, _ = crowded(ON)
    finish(world)
    assert world.moved == [] and world.core is not None
    assert world.core.describe().get("relief_migrate") is None
