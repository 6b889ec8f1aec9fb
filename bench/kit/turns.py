"""Sides take turns: who goes first changes, so that a drift of the machine favours neither.

Every comparison in these benches goes by it; `stats` makes a ratio of what was measured.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def alternate(sides: Sequence[Callable[[], T]], times: int) -> list[list[T]]:
    """Calls A B, B A, A B …; results by side."""
    results: list[list[T]] = [[] for _ in sides]
    for turn in range(times):
        for side in order_of(turn, len(sides)):
            results[side].append(sides[side]())
    return results


def order_of(turn: int, sides: int) -> list[int]:
    """In which order the sides go in a turn."""
    order = list(range(sides))
    return order if turn % 2 == 0 else order[::-1]
