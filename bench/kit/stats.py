"""Alternating turns of sides, and statistics: ratios with intervals, percentiles, exponents.

Machines are noisy, so a comparison is a ratio within one turn, with the sides measured back to back. Reports
have the median and the worst ratio, or the overall ratio with its 95 % interval. The bootstrap is seeded.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

T = TypeVar("T")
"""Result of a side in one round."""
Work = tuple[float, float]
"""(tokens, seconds)"""
_DRAWS = 4000
_SHARE = 0.95


@dataclass(frozen=True)
class Ratio:
    """Ratio of our side to theirs over all alternations; above 1 if ours is higher."""

    median: float
    worst: float
    """Lowest ratio, for rates and throughputs, where more is better."""
    highest: float
    alternations: int


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return the ratio over pairs. Raises ValueError if they do not pair up or a value is not positive."""
    if not ours or len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} measurements of ours against {len(theirs)} of theirs")
    if min(*ours, *theirs) <= 0:
        raise ValueError("a ratio needs positive measurements")
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios), len(ratios))


def alternate(sides: Sequence[Callable[[], T]], times: int) -> list[list[T]]:
    """Call A B, B A, A B …, so that a drift of the machine favours neither; return results by side."""
    results: list[list[T]] = [[] for _ in sides]
    for turn in range(times):
        for side in order_of(turn, len(sides)):
            results[side].append(sides[side]())
    return results


def order_of(turn: int, sides: int) -> list[int]:
    """Return the order of the sides in a turn."""
    return list(range(sides))[:: -1 if turn % 2 else 1]


def median_of_ratios(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios per round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def ratio_of_wholes(ours: Sequence[Work], theirs: Sequence[Work]) -> float:
    """Return the ratio of the overall rates, all tokens over all seconds."""
    rates = [sum(tokens for tokens, _ in each) / sum(took_s for _, took_s in each) for each in (ours, theirs)]
    return rates[0] / rates[1]


def interval(
    ours: Sequence[T], theirs: Sequence[T], of: Callable[[Sequence[T], Sequence[T]], float], seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % interval of a statistic. Raises ValueError for no rounds or unequal numbers."""
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


def with_interval(
    name: str, ours: Sequence[T], theirs: Sequence[T], of: Callable[[Sequence[T], Sequence[T]], float]
) -> dict[str, float]:
    """Return a statistic as figure `name`, and its 95 % interval as `name_low` and `name_high`."""
    low, high = interval(ours, theirs, of)
    return {name: of(ours, theirs), f"{name}_low": low, f"{name}_high": high}


def _rounds(draw: Random, rounds: int, stretch: int) -> list[int]:
    """Return as many rounds as there are, in stretches that wrap around."""
    chosen: list[int] = []
    while len(chosen) < rounds:
        first = draw.randrange(rounds)
        chosen += [(first + further) % rounds for further in range(stretch)]
    return chosen[:rounds]


_STUDENT_T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % quantiles for 2, 3, … values."""


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean's 95 % interval, assuming a normal distribution. Raises ValueError for fewer than 2
    values."""
    if len(values) < 2:
        raise ValueError("one value has no interval")
    t = _STUDENT_T[min(len(values) - 2, len(_STUDENT_T) - 1)]
    reach = t * statistics.stdev(values) / math.sqrt(len(values))
    middle = statistics.fmean(values)
    return middle - reach, middle + reach


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean, used to combine ratios of different workloads."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile by nearest rank, so a measured value. Raises ValueError if there are none."""
    if not values:
        raise ValueError("no value to take a percentile of")
    ordered = sorted(values)
    rank = -(-percent * len(ordered) // 100)
    return ordered[min(len(ordered), max(1, int(rank))) - 1]


def exponent(costs: Mapping[float, float]) -> float:
    """Return how a cost grows with size: the slope of log cost over log size."""
    return slope([(math.log(size), math.log(cost)) for size, cost in costs.items()])


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line through (x, y); 0 if all x are equal."""
    if len({x for x, _ in points}) < 2:
        return 0.0
    return statistics.linear_regression(*zip(*points, strict=True)).slope
