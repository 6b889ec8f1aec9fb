"""All mechanisms on, or stored prefixes that come and go: no block is lost, all answers end."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.core.stream import StreamPhase
from services.scheduler.policy import BUILT_IN
from tests.stack.actors import Wanted
from tests.stack.everything_world import MOST_LENT, EverythingWorld
from tests.stack.mixed_world import BLOCKS, Parts
from tests.stack.world import Pace, World

LONG_ENOUGH_S = 180.0
LONGEST = (2 * BLOCKS + MOST_LENT) * 16 - 60
"""More than a worker has at its highest level, and one other lends."""
AFTERWARDS_S = 15.0
chats = st.builds(
    Wanted,
    prompt_tokens=st.integers(20, 200),
    answer_tokens=st.integers(1, 60),
    max_tokens=st.sampled_from((2, 20, 60)),
    word=st.integers(3, 6),
)
longs = st.builds(
    Wanted,
    prompt_tokens=st.one_of(st.integers(BLOCKS * 16 - 60, LONGEST), st.integers(2 * BLOCKS * 16, LONGEST)),
    answer_tokens=st.integers(1, 40),
    max_tokens=st.just(40),
    word=st.integers(3, 5),
)
moments = st.floats(0.5, 6.0)
programs = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "requests": st.lists(
            st.tuples(st.floats(0.5, 4.0), st.one_of(chats, chats, chats, longs)), min_size=2, max_size=16
        ),
        "levels": st.lists(st.tuples(moments, st.integers(0, 9), st.sampled_from((0, 3, 5, 6))), max_size=8),
        "moves": st.lists(st.tuples(moments, st.integers(0, 99)), max_size=6),
        "cancels": st.lists(st.tuples(moments, st.integers(0, 15)), max_size=3),
        "kills": st.lists(st.tuples(moments, st.integers(0, 2), st.floats(0.02, 1.0)), max_size=2),
        "disk_blocks": st.sampled_from((0, 20, 60)),
        "copies_s": st.sampled_from(((0.0,), (0.001,), (0.01, 0.05), (0.0, 0.01, 0.3))),
        "relief": st.booleans(),
        "placement": st.sampled_from(("prefix_aware", "mell", None)),
    }
)


def play(
    seed: int,
    requests: list[tuple[float, Wanted]],
    levels: list[tuple[float, int, int]],
    moves: list[tuple[float, int]],
    cancels: list[tuple[float, int]],
    kills: list[tuple[float, int, float]],
    disk_blocks: int,
    copies_s: tuple[float, ...],
    relief: bool,
    placement: str | None,
) -> EverythingWorld:
    """All that was not cancelled is served, with its own tokens, and nothing is left of anything."""
    world = EverythingWorld(
        seed,
        [one for _, one in requests],
        Parts(placement=placement, relief=relief),
        workers=3,
        disk_blocks=disk_blocks,
        pace=Pace(copies_s=copies_s),
    )
    names = sorted(world.workers)
    for (start_s, _), key in zip(requests, world.wanted, strict=True):
        world.at(start_s, partial(world.submit, key))
    for at_s, number, level in levels:
        world.at(at_s, partial(world.resize, number, level))
    for at_s, number in moves:
        world.at(at_s, partial(world.move, number))
    for at_s, number, for_s in kills:
        world.at(at_s, partial(world.kill, world.workers[names[number]], for_s))
    for at_s, number in cancels:
        world.at(at_s, partial(cancel, world, number))
    world.run(LONG_ENOUGH_S)
    for request in world.requests:
        assert request.over, f"{request.key}: {request.stream.phase} {world.state()}"
        assert request.tokens == request.expected[: len(request.tokens)]
        assert request.stream.phase in (StreamPhase.ENDED, StreamPhase.CANCELLED), request.refused
    world.run_for(AFTERWARDS_S)
    assert not any(worker.used_blocks for worker in world.workers.values())
    assert (world.core.queued, world.core.running) == (0, 0)
    return world


def cancel(world: EverythingWorld, number: int) -> None:
    for request in world.requests[number:][:1]:
        world.cancel(request)


@settings(max_examples=20)
@given(programs)
def test_every_program_ends_well(program: dict[str, Any]) -> None:
    play(**program)


def test_what_hangs_on_a_lost_block_leaves_the_device_after_its_copy() -> None:
    """Its creditor is gone while own blocks behind it are copied to the host (one of the programs below)."""
    long = partial(Wanted, max_tokens=40, word=3)
    play(
        seed=4869,
        requests=[
            (3.0, long(prompt_tokens=768, answer_tokens=17)),
            (4.0, long(prompt_tokens=809, answer_tokens=3)),
            (3.0, Wanted(prompt_tokens=20, answer_tokens=1, max_tokens=2, word=3)),
            (4.0, long(prompt_tokens=814, answer_tokens=35)),
        ],
        levels=[],
        moves=[(1.0, 0)],
        cancels=[],
        kills=[(2.0, 0, 0.25), (5.5, 0, 1.0)],
        disk_blocks=0,
        copies_s=(0.0, 0.01, 0.3),
        relief=False,
        placement="prefix_aware",
    )


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(max_examples=10_000)
@given(programs)
def test_every_one_of_ten_thousand_programs_ends_well(program: dict[str, Any]) -> None:
    play(**program)


wanted = st.builds(
    Wanted,
    prompt_tokens=st.sampled_from((60, 100, 130, 200)),
    answer_tokens=st.integers(1, 40),
    max_tokens=st.sampled_from((1, 2, 20, 40)),
    word=st.integers(3, 8),
)
scenarios = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "requests": st.lists(st.tuples(st.floats(0.8, 5.0), wanted), min_size=4, max_size=24),
        "kv_blocks": st.sampled_from((16, 20, 24, 40)),
        "host_blocks": st.sampled_from((0, 12, 40, 100)),
        "copies_s": st.sampled_from(((0.0,), (0.001,), (0.01, 0.05), (0.3,), (3.0,), (0.0, 0.01, 0.1, 3.0))),
        "copy_faults": st.sampled_from((0.0, 0.1, 0.5)),
        "peer_blocks": st.sampled_from((0, 20, 100)),
    }
)


def play_tiers(
    seed: int,
    requests: list[tuple[float, Wanted]],
    kv_blocks: int,
    host_blocks: int,
    copies_s: tuple[float, ...],
    copy_faults: float,
    policy: str,
    peer_blocks: int = 0,
) -> World:
    """All are served, with their own tokens, and nothing is left of them."""
    world = World(
        seed,
        [one for _, one in requests],
        workers=1,
        kv_blocks=kv_blocks,
        cached=True,
        host_blocks=host_blocks,
        peer_blocks=peer_blocks,
        policy=BUILT_IN[policy],
        pace=Pace(copies_s=copies_s, copy_faults=copy_faults),
    )
    for (start_s, _), key in zip(requests, world.wanted, strict=True):
        world.at(start_s, partial(world.submit, key))
    world.run(LONG_ENOUGH_S)
    for request in world.requests:
        assert request.stream.phase is StreamPhase.ENDED, f"{request.key}: {request.stream.phase}"
        assert request.tokens == request.expected
    world.run_for(15.0)
    assert not any(worker.used_blocks for worker in world.workers.values())
    assert (world.core.queued, world.core.running) == (0, 0)
    return world


@pytest.mark.parametrize("policy", ["kvasir", "vllm"])
@settings(max_examples=25)
@given(scenario=scenarios)
def test_every_answer_is_exact_whatever_copies_take(policy: str, scenario: dict[str, Any]) -> None:
    play_tiers(**scenario, policy=policy)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", sorted(BUILT_IN))
@settings(max_examples=500)
@given(scenario=scenarios)
def test_under_any_policy(policy: str, scenario: dict[str, Any]) -> None:
    play_tiers(**scenario, policy=policy)


@pytest.mark.parametrize("policy", ["kvasir", "vllm"])
def test_blocks_do_come_from_the_host_and_nobody_falls_out_of_step(policy: str) -> None:
    """Decodes that are put off are taken back in time: no snapshot is asked for but the first."""
    requests = [(0.8 + 0.15 * number, Wanted(130, 30, 30, word=3 + number % 5)) for number in range(25)]
    world = play_tiers(3, requests, 24, 100, (0.01, 0.05), 0.0, policy)
    (tiers,) = world.tiers.values()
    assert tiers.loaded_blocks > 20, "this load does not show anything"
    assert len(world.lines("AskSnapshot")) == 1


def test_blocks_do_come_from_peers_some_of_which_die() -> None:
    requests = [(0.8 + 0.15 * number, Wanted(130, 30, 30, word=3 + number % 5)) for number in range(60)]
    world = play_tiers(3, requests, 16, 12, (0.001, 0.01), 0.0, "kvasir", peer_blocks=100)
    (cache,) = world.caches.values()
    assert cache.counts["hits_peer"] > 20, cache.counts
    assert cache.counts["lost_peer"] > 0, cache.counts
