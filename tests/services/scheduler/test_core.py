"""The core against fake workers in virtual time: whatever dies, every sequence ends once, with the right tokens."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy.contract import PolicySettings
from services.scheduler.rules import Rules
from tests.services.scheduler.world import Chaos, World


def check_answers(world: World) -> None:
    for request in world.requests.values():
        if not request.cancelled:
            assert request.refused is None, request.refused
            assert len(request.ends) == 1
            assert request.tokens == request.expected


def test_a_sequence_is_submitted_placed_planned_and_ends() -> None:
    world = World(workers=1)
    request = world.submit("a", prompt_tokens=10, answer_tokens=20, max_tokens=50)
    world.run_until(lambda: request.over, limit_s=2.0)
    assert request.tokens == request.expected
    assert len(request.tokens) == 20


def test_many_sequences_on_little_memory() -> None:
    world = World(workers=2, total_blocks=24)
    for number in range(40):
        world.submit(f"r{number}", 1 + number % 30, 1 + number * 7 % 60, 50)
    world.run_until(lambda: not world.unfinished(), limit_s=60.0)
    check_answers(world)
