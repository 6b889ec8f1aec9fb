"""Every policy and mechanism, and every pair of them, through one mixed load on virtual time.

Chats with a common beginning, long answers, prompts that need most of a worker and, where workers lend,
prompts that need more than one. All are served, and no pair is slower than 0.8 of the faster of its two
alone. This keeps combinations from being switched on that nobody ever ran: MELL at a tenth of the others'
throughput, a cache beside lending at which everything stopped.
"""

import random
from functools import cache, partial
from statistics import fmean

import pytest

from services.gateway.core.stream import StreamPhase
from tests.stack.actors import Wanted
from tests.stack.mixed_world import BLOCKS, LENDS, OFF_DEFAULT, PAIRS, Element, MixedWorld, Parts, name_of

SLOW_ALONE = set("ecoserve ecoserve_d ecoserve_sd ecoserve_sdo".split())
"""Batching policies that by themselves are below `LEAST` of the default, as the scheduler's README says."""
NEARLY_SLOW = {"ecoserve_profile", "fastserve"}
"""Alone about 0.8 of the default."""
BELOW: dict[tuple[Element, Element], float] = {
    (("policy", "ecoserve"), LENDS): 0.65,
    (("policy", "ecoserve_profile"), LENDS): 0.45,
    (("policy", "ecoserve_sdo"), LENDS): 0.65,
    (("placement", "load_balance"), LENDS): 0.7,
}
"""Pairs that keep less of their throughput (docs/lending.md)."""
LEAST = 0.8
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


def is_slow(one: Element) -> bool:
    return one[1] in SLOW_ALONE or one[1] in NEARLY_SLOW


@pytest.mark.parametrize("element", OFF_DEFAULT, ids=lambda one: name_of([one]))
def test_alone(element: Element) -> None:
    longs = element[0] == "lends"
    has_been_slow = tokens_per_s(element, longs=longs) < LEAST * tokens_per_s(longs=False)
    is_known = has_been_slow == (element[1] in SLOW_ALONE) or element[1] in NEARLY_SLOW
    assert longs or is_known, "what is slow alone is written down, and no more"


NAMED = {"policy", "placement", "order"}


def is_seldom(pair: tuple[Element, Element]) -> bool:
    """Two names, or a policy of research beside anything but loans."""
    return {one[0] for one in pair} <= NAMED or (LENDS not in pair and any(map(is_slow, pair)))


@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, marks=pytest.mark.slow if is_seldom(pair) else []) for pair in PAIRS],
    ids=name_of,
)
def test_together(pair: tuple[Element, Element]) -> None:
    """Only workers that lend can be asked for prompts longer than one, so with those only that half is
    compared. A pair can be no faster than a half that is slow alone."""
    longs = any(one[0] == "lends" for one in pair)
    halves = [one for one in pair if not longs or one[0] == "lends"]
    best = max(tokens_per_s(one, longs=longs) for one in halves)
    shares = [tokens_per_s(one, longs=False) / tokens_per_s(longs=False) for one in pair if is_slow(one)]
    best *= min(shares, default=1.0) if longs else 1.0
    best = min([best, *(share * tokens_per_s(longs=False) for share in shares if not longs)])
    assert tokens_per_s(*pair, longs=longs) >= BELOW.get(pair, LEAST) * best
