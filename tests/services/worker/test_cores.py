"""Threads on the cores they were bound to, others where they were."""

import os
import threading

import pytest

from services.worker.cores import bind_to
from shared.errors import ConfigError

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be bound here")


def test_only_the_calling_thread_is_bound() -> None:
    here = os.sched_getaffinity(0)
    core = max(here)
    seen: list[set[int]] = []

    def bound() -> None:
        bind_to((core,))
        seen.append(os.sched_getaffinity(0))
        started_from_here = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        started_from_here.start()
        started_from_here.join()

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    assert seen == [{core}, {core}]
    assert os.sched_getaffinity(0) == here


def test_no_cores_leave_a_thread_as_it_is() -> None:
    here = os.sched_getaffinity(0)
    bind_to(())
    assert os.sched_getaffinity(0) == here


def test_cores_that_are_not_there_are_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"engine_cores.*there are"):
        bind_to((100_000,), "engine_cores")
