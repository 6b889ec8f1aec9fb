"""Find the highest sustained rate by bisection."""

from collections.abc import Callable

TOLERANCE = 0.05
_DOUBLINGS = 3
"""Bound on the search: a finite run sustains any rate in the end."""
_HALVINGS = 16


def sustained_rate(
    is_sustained: Callable[[float], bool], start_rate: float, tolerance: float = TOLERANCE
) -> float:
    """Return the highest sustained rate found; a rate at most `tolerance` above it is not sustained.

    Returns 0 if 1/2^16 of `start_rate` is not sustained, and at most 4 times `start_rate`. If a rate is
    sustained, every lower rate is assumed to be.
    """
    low, high = 0.0, start_rate
    for _ in range(_DOUBLINGS):
        if not is_sustained(high):
            break
        low, high = high, 2 * high
    else:
        return low
    if low == 0.0:
        low = _descend(is_sustained, high)
        if low == 0.0:
            return 0.0
        high = 2 * low
    while high / low > 1 + tolerance:
        middle = (low * high) ** 0.5
        if is_sustained(middle):
            low = middle
        else:
            high = middle
    return low


def _descend(is_sustained: Callable[[float], bool], rate: float) -> float:
    for _ in range(_HALVINGS):
        rate /= 2
        if is_sustained(rate):
            return rate
    return 0.0
