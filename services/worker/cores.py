"""Binding threads to CPU cores. Knows nothing of what runs on them."""

import os
from collections.abc import Sequence

from shared.errors import ConfigError


def bind_to(cores: Sequence[int], setting: str = "cores") -> None:
    """Bind this thread, and those it starts from now on, to CPU cores; none leaves it as it is.

    Raises ConfigError, naming the setting, when they cannot be had.
    """
    check_cores(cores, setting)
    if cores:
        os.sched_setaffinity(0, cores)


def check_cores(cores: Sequence[int], setting: str) -> None:
    """Raises ConfigError where this process may not run on them."""
    if not cores:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("this system cannot bind a process to cores: leave it empty", param=setting)
    there = os.sched_getaffinity(0)
    if not set(cores) <= there:
        raise ConfigError(f"{setting} {list(cores)}: cannot be had; there are {sorted(there)}", param=setting)
