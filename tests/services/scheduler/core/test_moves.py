"""A running sequence changes workers: what is asked, rehearsed, switched, and all that may come between.

What is said about one migration, and what becomes of it when blocks cannot be fetched.
"""

from dataclasses import replace

import msgspec
import pytest

from services.scheduler.core.effects import PublishPrepared
from services.scheduler.core.moves import Move
from services.scheduler.core.rules import MoveRules, Rules
from services.scheduler.core.sequence import Phase
from shared.errors import InvalidRequest
from shared.messages.moves import BlocksPulled, MoveMode, SequenceMove
from tests.services.scheduler.world import SMALL, small_world
from tests.shared.messages.builders import ref
from tests.stack.actors import Request
from tests.stack.world import World

RULES = Rules(
    settings=SMALL.settings,
    round_s=SMALL.round_s,
    moves=MoveRules(deadline_s=3.0, switch_s=1.0, last_tokens=4, most_rounds=3, most_at_once=2),
)

OTHER = {"worker-0": "worker-1", "worker-1": "worker-0"}


def world_with(
    count: int = 1, *, cached: bool = True, tokens: int = 60, rules: Rules = RULES
) -> tuple[World, list[Request]]:
    """Two workers, and so many sequences that decode."""
    world = small_world(rules=rules, kv_blocks=256, cached=cached)
    requests = [world.ask_for(f"r{number}", 30, tokens, tokens + 10) for number in range(count)]
    world.until(lambda: all(len(request.tokens) > 2 for request in requests), limit_s=10)
    return world, requests


def move(world: World, request: Request, mode: MoveMode = MoveMode.TOKENS) -> str:
    """To the other worker, which is returned."""
    source = world.worker_of(request)
    assert source is not None
    world.move_to(OTHER[source], request, mode)
    return OTHER[source]


def finish(world: World) -> None:
    world.until(lambda: not world.unfinished(), limit_s=30)
    for request in world.requests:
        assert request.tokens == request.expected, "a gap, a repeat or another text"


def until_over(world: World, count: int = 1) -> None:
    world.until(lambda: len(world.moved) >= count, limit_s=10)


def test_it_is_rehearsed_and_then_handed_over() -> None:
    world, (request,) = world_with()
    target = move(world, request)
    until_over(world)
    (moved,) = world.moved
    assert (moved.reason, moved.target, moved.rounds) == ("", target, 1), "little is missing after one"
    assert request.attempt == 2 and world.worker_of(request) == target and moved.rehearsed_tokens >= 30
    prefilled = next(worker for name, worker in world.workers.items() if name == target).step_tokens
    assert 30 < sum(count for count, _ in prefilled) < 60, "the switch computes what the rehearsal lacked"
    finish(world)
    assert not any(worker.held for worker in world.workers.values() if worker.name != target)


def test_a_rehearsal_has_the_sequences_adapter() -> None:
    world, (request,) = world_with()
    sequence = world.core._roster.sequences[request.key]
    assert sequence.spec is not None
    sequence.spec = msgspec.structs.replace(sequence.spec, adapter="a")
    move(world, request)
    world.until(lambda: any("rehearsal=True" in line for line in world.lines("SendPlan")), limit_s=1.0)
    assert "adapter='a'" in next(line for line in world.lines("SendPlan") if "rehearsal=True" in line)


def test_what_the_source_adds_is_rehearsed_again() -> None:
    """After `most_rounds` the rest is computed in the pause, however much that is."""
    none_in_the_pause = replace(RULES, moves=replace(RULES.moves, last_tokens=0))
    world, requests = world_with(5, tokens=90, rules=none_in_the_pause)
    move(world, requests[0])
    until_over(world)
    assert (world.moved[0].reason, world.moved[0].rounds) == ("", RULES.moves.most_rounds)
    finish(world)


def test_where_the_target_has_filled_up_meanwhile_nothing_moves() -> None:
    world, (request,) = world_with()
    target = move(world, request)
    pipeline = world.core._roster.pipelines[target]
    world.until(lambda: pipeline.outstanding_steps > 0, limit_s=2.0)
    pipeline.report = msgspec.structs.replace(pipeline.report, max_context_tokens=10)
    until_over(world)
    assert (world.moved[0].reason, request.attempt) == (f"{target} has no room any more", 1)
    finish(world)


def test_without_a_cache_the_target_computes_everything_in_the_pause() -> None:
    world, (request,) = world_with(cached=False)
    move(world, request)
    until_over(world)
    assert (world.moved[0].reason, world.moved[0].rounds) == ("", 0)
    finish(world)


@pytest.mark.parametrize("after_s", [0.0, 0.004, 0.01, 0.02, 0.05])
@pytest.mark.parametrize("victim", ["source", "target", "scheduler"])
def test_deaths_at_every_stage(after_s: float, victim: str) -> None:
    world, (request,) = world_with()
    source = world.worker_of(request)
    target = move(world, request)
    world.run_for(after_s)
    if victim == "scheduler":
        world.kill(world.scheduler)
        world.after(1.0, world.start_scheduler)
    else:
        name = source if victim == "source" else target
        assert name is not None
        world.kill(world.workers[name])
        world.after(2.5, lambda: world.start_worker(name))
    finish(world)


def test_an_answer_that_was_taken_over_is_no_rehearsal() -> None:
    """Both are called after a request, with a number behind."""
    world, (request,) = world_with(tokens=90)
    taken_over = world.ask_for(f"{request.key[0]}~1", 30, 60, 70)
    world.until(lambda: len(taken_over.tokens) > 2, limit_s=10)
    move(world, request)
    until_over(world)
    assert world.moved[0].reason == ""
    finish(world)


def test_a_source_that_dies_leaves_its_sequence_to_the_target() -> None:
    world, (request,) = world_with()
    source = world.worker_of(request)
    target = move(world, request)
    world.run_for(0.004)
    assert source is not None and request.attempt == 1
    world.kill(world.workers[source])
    until_over(world)
    assert world.worker_of(request) in (target, None)
    finish(world)


def test_a_gateway_that_does_not_hear_of_it_leaves_it_where_it_is() -> None:
    world, (request,) = world_with(tokens=400)
    world.is_lost = lambda effect: isinstance(effect, PublishPrepared)
    source = world.worker_of(request)
    move(world, request)
    until_over(world)
    assert "not over" in world.moved[0].reason and world.worker_of(request) == source and request.attempt == 1
    finish(world)


def test_blocks_are_fetched_and_then_it_is_handed_over() -> None:
    world, (request,) = world_with(tokens=200)
    move(world, request, MoveMode.KV)
    until_over(world)
    (moved,) = world.moved
    assert (moved.reason, moved.mode, moved.fallback) == ("", MoveMode.KV, "")
    assert moved.rounds == len(world.lines("AskPull")) == 1 and moved.moved_bytes > 0
    finish(world)


def test_a_prompt_is_followed_while_it_is_computed() -> None:
    """Nobody takes the target for one that fetches nothing: there was nothing yet."""
    world = small_world(rules=RULES, kv_blocks=256, cached=True)
    request = world.ask_for("r", 200, 60, 70)
    world.until(lambda: world.worker_of(request) is not None and _is_prefilling(world, request), limit_s=10)
    target = move(world, request, MoveMode.KV)
    until_over(world)
    (moved,) = world.moved
    assert (moved.reason, moved.mode, moved.fallback) == ("", MoveMode.KV, "")
    assert len(world.lines("AskPull")) > moved.rounds, "chunk by chunk"
    assert world.worker_of(request) == target and moved.moved_bytes > 0
    finish(world)


def _is_prefilling(world: World, request: Request) -> bool:
    sequence = world.core._roster.sequences.get(request.ref.key)
    return sequence is not None and sequence.phase is Phase.PREFILLING


def test_what_cannot_be_fetched_goes_by_tokens() -> None:
    world, (request,) = world_with(tokens=200)
    world.caches.clear()
    move(world, request, MoveMode.KV)
    until_over(world)
    (moved,) = world.moved
    assert (moved.reason, moved.mode, len(world.lines("AskPull"))) == ("", MoveMode.TOKENS, 1)
    assert moved.fallback == "the blocks could not be fetched"
    finish(world)


def test_without_a_bulk_plane_it_goes_by_tokens_at_once() -> None:
    world, (request,) = world_with(tokens=200)
    for worker in world.workers.values():
        worker.says["kv_block_bytes"] = 0
    world.run_for(0.6)  # heartbeats say so
    move(world, request, MoveMode.KV)
    until_over(world)
    assert (world.moved[0].mode, world.moved[0].fallback) == (MoveMode.TOKENS, "no bulk plane leads there")
    finish(world)


@pytest.mark.parametrize("after_s", [0.0, 0.004, 0.01, 0.03])
@pytest.mark.parametrize("victim", ["source", "target"])
def test_deaths_while_blocks_are_fetched(after_s: float, victim: str) -> None:
    world, (request,) = world_with(tokens=200)
    source = world.worker_of(request)
    move(world, request, MoveMode.KV)
    world.run_for(after_s)
    name = source if victim == "source" else OTHER[source or ""]
    assert name is not None
    world.kill(world.workers[name])
    world.after(2.5, lambda: world.start_worker(name))
    finish(world)


def test_an_answer_that_ends_first_is_no_harm() -> None:
    world, (request,) = world_with(tokens=4)
    move(world, request)
    finish(world)
    until_over(world)
    assert world.moved[0].reason


def test_a_cancelled_sequence_does_not_move() -> None:
    world, (request,) = world_with()
    move(world, request)
    world.cancel(request)
    until_over(world)
    world.run_for(1.0)
    assert world.moved[0].reason and not any(worker.held for worker in world.workers.values())


def test_refusals_say_why() -> None:
    world, (first, second, third) = world_with(3, tokens=200)
    source = world.worker_of(first)
    assert source is not None
    with pytest.raises(InvalidRequest, match="cannot take it"):
        world.move_to(source, first)
    with pytest.raises(InvalidRequest, match="cannot take it"):
        world.move_to("worker-9", first)
    move(world, first)
    with pytest.raises(InvalidRequest, match="moves already"):
        move(world, first)
    move(world, second)
    with pytest.raises(InvalidRequest, match="on the move already"):
        move(world, third)
    with pytest.raises(InvalidRequest, match="does not run"):
        world.feed("on_move", SequenceMove(ref=ref("nobody"), target="worker-0", mode=MoveMode.TOKENS))
    finish(world)


def test_a_worker_with_other_weights_is_no_target() -> None:
    world, (request,) = world_with()
    world.start_worker("worker-9", weights="other")
    world.until(lambda: bool(world.lines("RefuseWorker")), limit_s=5)
    with pytest.raises(InvalidRequest, match="worker-9 cannot take it"):
        world.move_to("worker-9", request)
    finish(world)
    assert world.workers["worker-9"].step_tokens == [] and not world.moved


REF = ref()


def begun_move() -> Move:
    return Move(REF, "a", "b", MoveMode.KV, began_s=1.0, deadline_s=9.0)


def test_a_fetch_that_brings_nothing_is_no_step_ahead() -> None:
    one = begun_move()
    assert one.note_pull(BlocksPulled(held_tokens=32, fetched_blocks=2, fetched_bytes=100))
    assert not one.note_pull(BlocksPulled(held_tokens=32))
    assert (one.rehearsed_tokens, one.moved_bytes) == (32, 100)
    one.fall_back("gone")
    assert (one.mode, one.rounds, one.rehearsed_tokens) == (MoveMode.TOKENS, 0, 0)
    said = one.over("", 3.0)
    assert (said.fallback, said.moved_bytes, said.mode) == ("gone", 100, MoveMode.TOKENS)
