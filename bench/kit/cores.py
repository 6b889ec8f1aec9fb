"""Which thread of a side is its engine, and onto which core it goes.

The engine's thread of a side goes to core A, everything else of that side and the client to core B. Which one
computes is found by looking: of the process that has the model, the thread that uses most CPU time while the
side is under load. The same rule for every side.
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
        """The first two there are. Raises ConfigError when there is one only."""
        first, second, *_ = available_cores()
        return cls(first, second)

    def bind_client(self) -> None:
        """This process, all its threads, to the core that is not the engine's."""
        bind_threads({self.rest})

    @contextmanager
    def client(self) -> Iterator[None]:
        """`bind_client` for a `with` block: what is started after it has all cores again."""
        before = os.sched_getaffinity(0)
        self.bind_client()
        try:
            yield
        finally:
            bind_threads(before)

    def bind_engine(self) -> None:
        """This process, all its threads, to the engine's core: it is the engine."""
        bind_threads({self.engine})


def bind_threads(cores: Collection[int]) -> None:
    """This process, all its threads, to these cores, also to some that who started it did not have."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
            os.sched_setaffinity(int(thread.name), cores)


def pin(side: ProcessTree, cores: Cores, load: Callable[[], object], process: str = "") -> int:
    """Binds every thread of a side after watching it under `load`; returns the id of the engine's thread.

    The engine is looked for in processes whose name begins with `process`. Raises InternalError without one.
    """
    (engine,) = watch(side, load, [process])
    side.bind([engine], {cores.engine}, {cores.rest})
    return engine


def watch(side: ProcessTree, load: Callable[[], object], processes: Sequence[str]) -> list[int]:
    """The busiest thread under `load` of each of these processes, told by how their names begin. Raises
    InternalError where there is none."""
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
