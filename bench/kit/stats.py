"""From measurements to figures: ratios of two sides with their interval, percentiles, exponents. Pure.

Machines are noisy, so a comparison is a ratio within one turn, the sides measured one right after the other;
reported are the median and the worst, or the whole with the interval that holds it with 95 %. Draws of the
bootstrap are seeded. Neighbouring rounds are alike (long answers last several), so stretches of them are
drawn, not single ones.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

T = TypeVar("T")
"""What a side did in one round."""
Work = tuple[float, float]
"""Tokens, seconds."""
_DRAWS = 4000
_SHARE = 0.95


@dataclass(frozen=True)
class Ratio:
    """Of ours to theirs over all alternations; > 1: ours is more."""

    median: float
    worst: float
    """The lowest: of rates and throughputs, where more is better."""
    highest: float
    alternations: int


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Pairs by alternation. Raises ValueError when they do not pair up or something is not positive."""
    if not ours or len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} measurements of ours against {len(theirs)} of theirs")
    if min(*ours, *theirs) <= 0:
        raise ValueError("a ratio needs positive measurements")
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios), len(ratios))


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


_STUDENT_T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % quantiles for 2, 3, … values."""


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Holds the mean with 95 %, if values are drawn from a normal law. Raises ValueError for fewer than 2."""
    if len(values) < 2:
        raise ValueError("one value has no interval")
    t = _STUDENT_T[min(len(values) - 2, len(_STUDENT_T) - 1)]
    reach = t * statistics.stdev(values) / math.sqrt(len(values))
    middle = statistics.fmean(values)
    return middle - reach, middle + reach


def geometric_mean(values: Iterable[float]) -> float:
    """How ratios of different workloads are combined into one."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def percentile(values: Sequence[float], percent: float) -> float:
    """By the nearest rank: a value that was measured. Raises ValueError without values."""
    if not values:
        raise ValueError("no value to take a percentile of")
    ordered = sorted(values)
    rank = -(-percent * len(ordered) // 100)
    return ordered[min(len(ordered), max(1, int(rank))) - 1]


def exponent(costs: Mapping[float, float]) -> float:
    """How a cost grows with a size: the slope of log cost over log size, by least squares."""
    points = [(math.log(size), math.log(cost)) for size, cost in costs.items()]
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
