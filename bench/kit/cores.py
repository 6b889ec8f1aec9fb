"""Pins each side's engine thread to core A, and its other threads and the client to core B.

The engine thread is the one that uses most CPU time under load in the process that has the model. The rule is
the same for every side.
"""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.kit.processes import ProcessTree, available_cores, busiest_threads
from shared.errors import InternalError


@dataclass(frozen=True)
class Cores:
    """The two cores of a comparison."""

    engine: int
    rest: int

    @classmethod
    def choose(cls) -> "Cores":
        """Return the first two available cores. Raises ConfigError if there is only one."""
        first, second, *_ = available_cores()
        return cls(first, second)

    def bind_client(self) -> None:
        """Bind all threads of this process to the core without the engine."""
        bind_threads({self.rest})

    @contextmanager
    def client(self) -> Iterator[None]:
        """Bind as `bind_client` does for a `with` block, then restore all cores."""
        before = os.sched_getaffinity(0)
        self.bind_client()
        try:
            yield
        finally:
            bind_threads(before)


def bind_threads(cores: Collection[int]) -> None:
    """Bind all threads of this process to `cores`, which may lie outside its inherited set."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread.name), cores)


def pin(side: ProcessTree, cores: Cores, load: Callable[[], object], process: str = "") -> int:
    """Watch a side under `load`, bind all its threads, and return the id of its engine thread.

    The name of the engine's process begins with `process`. Raises InternalError if there is none.
    """
    (engine,) = watch(side, load, [process])
    side.bind([engine], {cores.engine}, {cores.rest})
    return engine


def watch(side: ProcessTree, load: Callable[[], object], processes: Sequence[str]) -> list[int]:
    """Return the busiest thread under `load` of each process, given by the start of its name. Raises
    InternalError if a process is missing."""
    before = side.cpu_s()
    load()
    after = side.cpu_s()
    engines = []
    for process in processes:
        of_engine = side.threads_of(process)
        used = {thread: used_s for thread, used_s in after.items() if thread in of_engine}
        if not used:
            raise InternalError(f"{side.name} has no process {process!r}:\n{side.tail()}")
        engines.append(busiest_threads(before, used)[0])
    return engines
