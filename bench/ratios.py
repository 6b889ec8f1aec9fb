"""Comparisons on a noisy machine: the two sides take turns, the ratio is taken within each turn.

Every alternation gives one ratio (ours / theirs, measured one right after the other); reported are the median
and the worst. Knows nothing of what was measured.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


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


def geometric_mean(values: Iterable[float]) -> float:
    """How ratios of different workloads are combined into one."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def alternate(sides: Sequence[Callable[[], T]], times: int) -> list[list[T]]:
    """Calls A B, B A, A B …: who goes first changes, so that a drift favours neither. Results by side."""
    results: list[list[T]] = [[] for _ in sides]
    for turn in range(times):
        for side in order_of(turn, len(sides)):
            results[side].append(sides[side]())
    return results


def order_of(turn: int, sides: int) -> list[int]:
    """In which order the sides go in a turn."""
    order = list(range(sides))
    return order if turn % 2 == 0 else order[::-1]
