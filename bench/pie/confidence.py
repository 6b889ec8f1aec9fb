"""How sure a ratio of two sides measured by turns is: bootstrap over the rounds. Pure, the draws seeded.

Neighbouring rounds are alike (long answers last several), so stretches of them are drawn, not single ones.
"""

import statistics
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")
"""What a side did in one round."""
Work = tuple[float, float]
"""Tokens, seconds."""
_DRAWS = 4000
_SHARE = 0.95


def median_of_ratios(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Each ratio within one round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def ratio_of_wholes(ours: Sequence[Work], theirs: Sequence[Work]) -> float:
    """All tokens over all seconds, of ours over theirs."""
    rates = [sum(tokens for tokens, _ in each) / sum(took_s for _, took_s in each) for each in (ours, theirs)]
    return rates[0] / rates[1]


def interval(
    ours: Sequence[T], theirs: Sequence[T], of: Callable[[Sequence[T], Sequence[T]], float], seed: int = 0
) -> tuple[float, float]:
    """Holds the statistic with 95 %. Raises ValueError without rounds, or where they do not pair up."""
    rounds = len(ours)
    if not rounds or rounds != len(theirs):
        raise ValueError(f"{rounds} rounds of ours against {len(theirs)} of theirs")
    draw, stretch = Random(f"interval/{seed}"), max(1, round(rounds ** (1 / 3)))
    found = sorted(
        of([ours[at] for at in chosen], [theirs[at] for at in chosen])
        for chosen in (_rounds(draw, rounds, stretch) for _ in range(_DRAWS))
    )
    tail = round((1 - _SHARE) / 2 * (_DRAWS - 1))
    return found[tail], found[-1 - tail]


def _rounds(draw: Random, rounds: int, stretch: int) -> list[int]:
    """As many as there are, in stretches that go round the end."""
    chosen: list[int] = []
    while len(chosen) < rounds:
        first = draw.randrange(rounds)
        chosen += [(first + further) % rounds for further in range(stretch)]
    return chosen[:rounds]
