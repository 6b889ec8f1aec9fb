"""Every policy and mechanism, and every pair of them, through one mixed load on virtual time.

Chats with a common beginning, long answers, prompts that need most of a worker and, where workers lend,
prompts that need more than one. All are served, none is slower than 0.75 of the default, and no pair than
0.8 of the slower of its two alone. This keeps combinations from being switched on that nobody ever ran: MELL
at a tenth of the others' throughput, a cache beside lending at which everything stopped.
"""

import random
from functools import cache, partial
from statistics import fmean

import pytest

from services.gateway.core.stream import StreamPhase
from tests.stack.actors import Wanted
from tests.stack.mixed_world import BLOCKS, LENDS, OFF_DEFAULT, PAIRS, Element, MixedWorld, Parts, name_of

ALONE, TOGETHER = 0.75, 0.8
PROMPT_S = 0.4
LONG_ENOUGH_S = 60.0


def load(*, longs: bool) -> list[tuple[float, Wanted]]:
    """When, and what."""
    dice = random.Random(5)
    kinds = ["chat"] * 15 + ["talk"] * 10 + ["large"] * 3 + ["long"] * 2 * longs
    dice.shuffle(kinds)
    made = {
        "chat": lambda number: Wanted(100, 12, 12, word=3 + number % 3),
        "talk": lambda number: Wanted(10 + number, 40 + number, 90, word=10 + number),
        "large": lambda number: Wanted(BLOCKS * 16 - 110, 20, 30, word=10 + number),
        "long": lambda number: Wanted(BLOCKS * 16 + 60, 20, 30, word=10 + number),
    }
    return [(0.8 + PROMPT_S * dice.random(), made[kind](number)) for number, kind in enumerate(kinds)]


@cache
def tokens_per_s(*elements: Element, longs: bool) -> float:
    """Of the whole load, all of which has to be served; the mean of three worlds, which differ by 10 %."""
    return fmean(_tokens_per_s(Parts(**dict(elements)), seed, longs=longs) for seed in (1, 2, 3))


def _tokens_per_s(parts: Parts, seed: int, *, longs: bool) -> float:
    asked = load(longs=longs)
    world = MixedWorld(seed, [one for _, one in asked], parts)
    for (start_s, _), key in zip(asked, world.wanted, strict=True):
        world.at(start_s, partial(world.submit, key))
    world.run(LONG_ENOUGH_S)
    world.core.check_integrity()
    for key, stream in world.streams.items():
        assert stream.phase is StreamPhase.ENDED, f"{parts}: {key} is {stream.phase}: {world.state()}"
        assert stream.tokens == world.wanted[key].answer(key)
    return sum(len(stream.tokens) for stream in world.streams.values()) / (world.now_s - 0.8)


@pytest.mark.parametrize("element", OFF_DEFAULT, ids=lambda one: name_of([one]))
def test_alone(element: Element) -> None:
    longs = element[0] == "lends"
    alone = tokens_per_s(element, longs=longs)  # which asserts that all is served
    assert longs or alone >= ALONE * tokens_per_s(longs=False)


NAMED = {"policy", "placement", "order"}


def is_seldom(pair: tuple[Element, Element]) -> bool:
    """Two names, or a policy of research beside anything but loans."""
    of_research = any(str(one[1]).startswith(("ecoserve", "fastserve")) for one in pair)
    return {one[0] for one in pair} <= NAMED or (LENDS not in pair and of_research)


@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, marks=pytest.mark.slow if is_seldom(pair) else []) for pair in PAIRS],
    ids=name_of,
)
def test_together(pair: tuple[Element, Element]) -> None:
    """Where workers lend, the load has prompts longer than one, so only that half is compared."""
    longs = any(one[0] == "lends" for one in pair)
    halves = [one for one in pair if not longs or one[0] == "lends"]
    slower = min(tokens_per_s(one, longs=longs) for one in halves)
    assert tokens_per_s(*pair, longs=longs) >= TOGETHER * slower
