"""Alternating turns: the order of the sides changes, so that drift of the machine favours neither."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def alternate(sides: Sequence[Callable[[], T]], times: int) -> list[list[T]]:
    """Call A B, B A, A B …; return results by side."""
    results: list[list[T]] = [[] for _ in sides]
    for turn in range(times):
        for side in order_of(turn, len(sides)):
            results[side].append(sides[side]())
    return results


def order_of(turn: int, sides: int) -> list[int]:
    """Return the order of the sides in a turn."""
    order = list(range(sides))
    return order if turn % 2 == 0 else order[::-1]
