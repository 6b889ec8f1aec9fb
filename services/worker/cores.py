"""Binding threads to CPU cores. Knows nothing of what runs on them."""

import os
from collections.abc import Sequence

from shared.errors import ConfigError


def bind_to(cores: Sequence[int], setting: str = "cores") -> None:
    """Bind this thread, and those it starts from now on, to CPU cores; none leaves it as it is.

    Raises ConfigError, naming the setting, when they cannot be had.
    """
    if not cores:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("this system cannot bind a process to cores: leave it empty", param=setting)
    there = sorted(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise ConfigError(
            f"{setting} {list(cores)}: cannot be had; there are {there}", param=setting
        ) from error
