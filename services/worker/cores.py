"""Binds threads to CPU cores."""

import os
from collections.abc import Sequence

from shared.errors import ConfigError


def bind_to(cores: Sequence[int], setting: str = "cores") -> None:
    """Bind this thread, and threads that it starts later, to CPU cores; empty changes nothing.

    Raises ConfigError, naming the setting, if they are not available.
    """
    check_cores(cores, setting)
    if cores:
        os.sched_setaffinity(0, cores)


def check_cores(cores: Sequence[int], setting: str) -> None:
    """Raise ConfigError if this process may not run on the cores."""
    if not cores:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("this system cannot bind a process to cores: leave it empty", param=setting)
    there = os.sched_getaffinity(0)
    if not set(cores) <= there:
        raise ConfigError(f"{setting} {list(cores)}: cannot be had; there are {sorted(there)}", param=setting)
