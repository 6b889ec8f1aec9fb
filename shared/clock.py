"""Clocks. Policy cores take `now_s` as an argument instead of reading a clock."""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds with an arbitrary origin."""

    def __call__(self) -> float: ...


def monotonic_s() -> float:
    """Return seconds of CLOCK_MONOTONIC, which also runs while the process is stopped."""
    return time.monotonic()


def unix_s() -> float:
    """Return wall-clock seconds. Use only for display, `created` fields and the first epoch of a lease."""
    return time.time()
