"""Exponentially weighted running average. Pure."""


def averaged(before: float | None, measured: float, weight: float) -> float:
    """Return the average after one more measurement; `before` is None for the first. averaged(2.0, 4.0, 0.1)
    is 2.2. A measurement n steps ago has weight 0.1 · 0.9ⁿ."""
    return measured if before is None else before + weight * (measured - before)
