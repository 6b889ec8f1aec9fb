"""The running average of what is measured again and again: exponentially weighted. Pure."""


def averaged(before: float | None, measured: float, weight: float) -> float:
    """What is known after one more measurement, which counts `weight` of the whole; None: it is the first.

    averaged(2.0, 4.0, 0.1) is 2.2: what was measured n times ago has a weight of 0.1 · 0.9ⁿ left.
    """
    return measured if before is None else before + weight * (measured - before)
