"""The highest rate that is sustained, by bisection."""

from collections.abc import Callable

TOLERANCE = 0.05
_DOUBLINGS = 3
"""A finite run sustains anything at some point: all of it at once, in the end."""
_HALVINGS = 16


def sustained_rate(
    is_sustained: Callable[[float], bool], start_rate: float, tolerance: float = TOLERANCE
) -> float:
    """The highest rate found that is sustained; the next one tried, at most `tolerance` above it, is not.

    0 when 1/2^16 of `start_rate` is too much already; at most 4 times `start_rate`. Takes whatever is
    sustained to be so at lower rates.
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
