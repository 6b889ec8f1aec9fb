"""Percentiles and means of measured durations."""

import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """By the nearest rank: a value that was measured. Raises ValueError without values."""
    if not values:
        raise ValueError("no value to take a percentile of")
    ordered = sorted(values)
    rank = -(-percent * len(ordered) // 100)
    return ordered[min(len(ordered), max(1, int(rank))) - 1]


def summary(name: str, values_s: Sequence[float]) -> dict[str, float]:
    """Figures `NAME_ms_p50`, `_p99` and `_mean`."""
    return {
        f"{name}_ms_p50": percentile(values_s, 50) * 1e3,
        f"{name}_ms_p99": percentile(values_s, 99) * 1e3,
        f"{name}_ms_mean": statistics.fmean(values_s) * 1e3,
    }
