"""Stored prefixes that come from the host, or from peers that come and go, while others run, on virtual time:
every answer is exact, whatever copies take and how many fail, and no block is lost."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.core.stream import StreamPhase
from services.scheduler.policy import BUILT_IN
from tests.stack.actors import Wanted
from tests.stack.world import Pace, World

LONG_ENOUGH_S = 180.0
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


def play(
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
@settings(max_examples=25, deadline=None)
@given(scenario=scenarios)
def test_every_answer_is_exact_whatever_copies_take(policy: str, scenario: dict[str, Any]) -> None:
    play(**scenario, policy=policy)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", sorted(BUILT_IN))
@settings(max_examples=500, deadline=None)
@given(scenario=scenarios)
def test_under_any_policy(policy: str, scenario: dict[str, Any]) -> None:
    play(**scenario, policy=policy)


@pytest.mark.parametrize("policy", ["kvasir", "vllm"])
def test_blocks_do_come_from_the_host_and_nobody_falls_out_of_step(policy: str) -> None:
    """Decodes that are put off are taken back in time: no snapshot is asked for but the first."""
    requests = [(0.8 + 0.15 * number, Wanted(130, 30, 30, word=3 + number % 5)) for number in range(25)]
    world = play(3, requests, 24, 100, (0.01, 0.05), 0.0, policy)
    (tiers,) = world.tiers.values()
    assert tiers.loaded_blocks > 20, "this load does not show anything"
    assert len(world.lines("AskSnapshot")) == 1


def test_blocks_do_come_from_peers_some_of_which_die() -> None:
    requests = [(0.8 + 0.15 * number, Wanted(130, 30, 30, word=3 + number % 5)) for number in range(60)]
    world = play(3, requests, 16, 12, (0.001, 0.01), 0.0, "kvasir", peer_blocks=100)
    (cache,) = world.caches.values()
    assert cache.counts["hits_peer"] > 20, cache.counts
    assert cache.counts["lost_peer"] > 0, cache.counts
