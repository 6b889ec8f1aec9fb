"""Clocks. Decision cores never read one: they are handed `now_s`. Shells read these."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that never go backwards; only differences mean anything."""

    def __call__(self) -> float: ...


def monotonic_s() -> float:
    """Seconds of CLOCK_MONOTONIC. It runs on while the process is stopped: a woken worker's plans expire."""
    return time.monotonic()


def unix_s() -> float:
    """Wall-clock seconds, for stamps people read and for `created` fields only."""
    return time.time()
