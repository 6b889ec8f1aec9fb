"""Cached and lent blocks together, under chats with a common beginning and prompts longer than a worker.

Whatever is cached, lent and borrowed meanwhile: everything that was accepted ends.
"""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.core.stream import StreamPhase
from tests.stack.actors import Wanted
from tests.stack.mixed_world import BLOCKS, CAP, MixedWorld, Parts

LONG_ENOUGH_S = 120.0
ANYWHERE = Parts(placement=None, lends=True)


def serve(world: MixedWorld, starts_s: list[float]) -> float:
    """When all have ended, seconds."""
    for start_s, key in zip(starts_s, world.wanted, strict=True):
        world.at(start_s, partial(world.submit, key))
    world.run(LONG_ENOUGH_S)
    for key, stream in world.streams.items():
        assert stream.phase is StreamPhase.ENDED, world.state()
        assert stream.tokens == world.wanted[key].answer(key)
    return world.now_s


chats = st.builds(
    Wanted,
    prompt_tokens=st.integers(60, 130),
    answer_tokens=st.integers(1, 40),
    max_tokens=st.just(40),
    word=st.integers(3, 5),
)
longs = st.builds(
    Wanted,
    prompt_tokens=st.integers(BLOCKS * 16 - 60, (BLOCKS + CAP) * 16 - 60),
    answer_tokens=st.integers(1, 40),
    max_tokens=st.just(40),
    word=st.integers(3, 9),
)
requests = st.tuples(st.floats(0.8, 3.0), st.one_of(chats, chats, chats, longs))


@settings(max_examples=60, deadline=None)
@given(st.lists(requests, min_size=1, max_size=24), st.integers(0, 2**16))
def test_all_end(load: list[tuple[float, Wanted]], seed: int) -> None:
    serve(MixedWorld(seed, [one for _, one in load], ANYWHERE, workers=2), [start_s for start_s, _ in load])


@pytest.mark.parametrize("policy", ["kvasir", "vllm"])
@pytest.mark.parametrize("lends", [False, True])
def test_blocks_that_only_the_cache_held_back_count_again_once_they_are_free(
    policy: str, lends: bool
) -> None:
    """What stopped a stack for ever: of two prompts that began alike and came together the cache keeps one's
    blocks for as long as the other goes on from them. Once missed in a snapshot they were never counted
    again, and a prompt that needed them waited, while its worker had free or borrowed all it asked for."""
    twins = [Wanted(100, 1, 1), Wanted(100, 100, 100)]
    long = Wanted((BLOCKS + CAP // 2) * 16 if lends else BLOCKS * 16 - 40, 20, 40, word=4)
    world = MixedWorld(1, [*twins, long], replace(ANYWHERE, lends=lends, policy=policy), workers=2)
    world.choose = lambda _: "worker-0"
    world.at(0.9, lambda: world.kill(world.scheduler, 0.3))  # the next one begins with a snapshot
    missing: list[int] = []
    world.at(1.9, lambda: missing.append(world.missing_blocks("worker-0")))
    assert serve(world, [0.1, 0.1, 4.0]) < 10.0
    assert missing == [6]
