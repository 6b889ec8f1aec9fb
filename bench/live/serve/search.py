"""Which rate to try next, and what is sustained by what has been tried. Pure.

Rates are `base · ratio^k`, so that all sides are asked at the same ones.
"""

from collections.abc import Mapping
from math import log

_STRIDE = 2
_REACH = 48
"""Rates more than so many steps away from the base are not tried."""


def nearest_step(rate_per_s: float, base_per_s: float, ratio: float) -> int:
    """The step whose rate is nearest."""
    return max(-_REACH, min(_REACH, round(log(rate_per_s / base_per_s, ratio))))


def next_step(tried: Mapping[int, bool], first: int) -> int | None:
    """The step to try next, None when the knee lies between two neighbours or beyond reach.

    `tried`: step → whether it was sustained. Takes what is sustained to be so at lower rates. The search
    goes away from `first` in strides that double.
    """
    low, high = _bracket(tried)
    stride = _STRIDE * 2 ** max(0, len(tried) - 2)
    if low is None and high is None:
        return first
    if high is None:
        assert low is not None
        return None if low >= _REACH else min(_REACH, low + stride)
    if low is None:
        return None if high <= -_REACH else max(-_REACH, high - stride)
    return None if high - low <= 1 else (low + high) // 2


def knee_step(tried: Mapping[int, bool]) -> int | None:
    """The highest step sustained below every one that was not; None when nothing was."""
    return _bracket(tried)[0]


def _bracket(tried: Mapping[int, bool]) -> tuple[int | None, int | None]:
    high = min((step for step, kept in tried.items() if not kept), default=None)
    low = max((step for step, kept in tried.items() if kept and (high is None or step < high)), default=None)
    return low, high
