"""Who carries Pie's transfers out on a CPU: one thread per direction, paced by a link.

Knows slots and block ids; decides nothing. The same protocol has a version with CUDA streams (`streams`), and
one without any overlap, for comparison.
"""

import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from services.worker.pie.core.copies import Runs
from services.worker.pie.core.swap import Direction, Transfer
from services.worker.pie.memory import LayerMemory

_LEAST_SHARE = 0.02
"""Of the limit, whatever the others send."""


class PacedLink:
    """One direction of a link that carries `limit_bytes_s` (0: as fast as memory): a CPU's stand-in for PCIe.

    Copies are paced to that, less what others send (`background_bytes_s`, which may change at any time). Time
    is spent asleep, as it is while a copy engine works.
    """

    def __init__(
        self, limit_bytes_s: float, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self.limit_bytes_s = limit_bytes_s
        self.background_bytes_s = 0.0
        self._clock, self._sleep = clock, sleep
        self._due_s = 0.0

    @property
    def rate_bytes_s(self) -> float:
        """What is left for copies; 0: no limit."""
        return max(self.limit_bytes_s - self.background_bytes_s, _LEAST_SHARE * self.limit_bytes_s)

    def open(self) -> None:
        """A transfer begins: time in which nothing was sent is lost."""
        self._due_s = max(self._due_s, self._clock())

    def pace(self, sent_bytes: int) -> None:
        """So many bytes were copied; returns when the link would have carried them."""
        rate = self.rate_bytes_s
        if not rate:
            return
        self._due_s += sent_bytes / rate
        wait_s = self._due_s - self._clock()
        if wait_s > 0:
            self._sleep(wait_s)


_log = logging.getLogger("kvasir.worker.pie")

SwapDone = Callable[[Transfer, int, float, BaseException | None], None]
"""Transfer, bytes, seconds it took, what went wrong. Called on any thread."""


class Copier(Protocol):
    """Copies in the background; at most one transfer per direction is given to it at a time."""

    @property
    def poll_interval_s(self) -> float:
        """While somebody waits: how often `poll` is to be called."""
        ...

    def start(self, done: SwapDone) -> None: ...

    def submit(self, transfer: Transfer, runs: Runs) -> None:
        """`runs`: the blocks to be copied; a copy out goes to a place that was reserved."""
        ...

    def before_layer(self) -> None:
        """A layer, which is present, is computed next."""
        ...

    def after_layer(self) -> None:
        """A computation on the slots was submitted: what is copied from now on comes after it."""
        ...

    def poll(self) -> None:
        """Report what is complete, where no thread does so by itself."""
        ...

    def close(self, deadline_s: float) -> bool:
        """End; False when that took longer."""
        ...


class ThreadCopier:
    """Implements `Copier` between two places in RAM."""

    poll_interval_s = 1.0

    def __init__(
        self, memory: LayerMemory, links: dict[Direction, PacedLink], clock: Callable[[], float]
    ) -> None:
        self._memory, self._links, self._clock = memory, links, clock
        self._queues: dict[Direction, queue.Queue[tuple[Transfer, Runs, float] | None]] = {
            direction: queue.Queue(2) for direction in Direction
        }
        self._threads: list[threading.Thread] = []

    def start(self, done: SwapDone) -> None:
        for direction in Direction:
            thread = threading.Thread(
                target=self._run, args=(direction, done), name=f"pie-{direction}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def submit(self, transfer: Transfer, runs: Runs) -> None:
        self._queues[transfer.direction].put_nowait((transfer, runs, self._clock()))

    def before_layer(self) -> None:
        """Nothing: a completed copy is visible."""

    def after_layer(self) -> None:
        """Nothing: the computation is over."""

    def poll(self) -> None:
        """Nothing: the threads report."""

    def close(self, deadline_s: float) -> bool:
        for each in self._queues.values():
            each.put_nowait(None)
        for thread in self._threads:
            thread.join(deadline_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, direction: Direction, done: SwapDone) -> None:
        if hasattr(os, "sched_setaffinity"):  # Not on the engine's core, if it has one for itself.
            os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))
        while (work := self._queues[direction].get()) is not None:
            transfer, runs, began_s = work  # The thread's waking is part of what a swap takes.
            sent = 0
            failure: BaseException | None = None
            try:
                sent = self._copy(transfer, runs)
            except Exception as error:
                _log.exception("%s failed", transfer)
                failure = error
            done(transfer, sent, self._clock() - began_s, failure)

    def _copy(self, transfer: Transfer, runs: Runs) -> int:
        return copied(self._memory, self._links[transfer.direction], transfer, runs)


class InlineCopier:
    """Implements `Copier` in the computation's own time: each copy is over before the computation goes on.

    What swapping costs without Pie's overlap (papers/004 §2.3, on FlexGen); for comparison only.
    """

    poll_interval_s = 1.0

    def __init__(
        self, memory: LayerMemory, links: dict[Direction, PacedLink], clock: Callable[[], float]
    ) -> None:
        self._memory, self._links, self._clock = memory, links, clock
        self._done: SwapDone | None = None

    def start(self, done: SwapDone) -> None:
        self._done = done

    def submit(self, transfer: Transfer, runs: Runs) -> None:
        """Copies, and reports at once: `done` may submit the next before this returns."""
        assert self._done is not None
        began_s = self._clock()
        sent = copied(self._memory, self._links[transfer.direction], transfer, runs)
        self._done(transfer, sent, self._clock() - began_s, None)

    def before_layer(self) -> None:
        """Nothing: a completed copy is visible."""

    def after_layer(self) -> None:
        """Nothing: the computation is over."""

    def poll(self) -> None:
        """Nothing: what was submitted is complete."""

    def close(self, deadline_s: float) -> bool:
        return True


def copied(memory: LayerMemory, link: PacedLink, transfer: Transfer, runs: Runs) -> int:
    """Copy blocks of a layer over a link of RAM, at its pace; the bytes."""
    link.open()
    copy = memory.copy_out if transfer.direction is Direction.OUT else memory.copy_in
    return copy(transfer.device_slot, transfer.host_slot, runs, link.pace)
