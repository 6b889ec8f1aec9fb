"""Every copy of KV between tiers and workers: its order, its end, and the place for its result.

One thread runs urgent copies, another polite ones, each in this order:

    a load for a sequence > blocks from and for other workers > reads ahead       (urgent thread)
    stores written through to the host > writes to disk > to peers > shadows    (polite thread)

Copies that nothing waits for are held, for a while, while a running step reads from the host or from peers.
Each copy has a ticket with one answer: done, failed, given up or too late. Answers wait for the thread that
owns the blocks (`settle`), so that a place is not reused while something may still be written to it."""

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from queue import PriorityQueue
from time import monotonic, perf_counter
from typing import Any, Generic, TypeVar

from shared.errors import DeadlineExceeded, InternalError, Overloaded
from shared.log import get_logger
from shared.metrics import counter

_logger = get_logger("worker.transfers")
_bytes = counter("kvasir_worker_transferred_bytes_total", "KV copied between tiers and workers.", ["route"])
_seconds = counter("kvasir_worker_transfer_seconds_total", "Time that these copies took.", ["route"])
_lost = counter("kvasir_worker_transfers_lost_total", "Copies that failed, or were given up.", ["route"])

T = TypeVar("T")


class Throttle:
    """Limits a copy to so many bytes a second, for tests and benches; 0 does not limit."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self._bytes_per_s = bytes_per_s
        self._never = threading.Event()

    def wait(self, size_bytes: int, until_s: float = inf) -> bool:
        """Sleep as long as so many bytes need. False, after the time left, if that is past `until_s`
        (monotonic clock)."""
        if not self._bytes_per_s:
            return True
        needed_s, left_s = size_bytes / self._bytes_per_s, until_s - monotonic()
        self._never.wait(max(0.0, min(needed_s, left_s)))
        return needed_s <= left_s


class Route(IntEnum):
    """Source and target of a copy, the most urgent first. A sequence waits for those before READ."""

    LOAD = 0
    """Host, peers or disk to the device."""
    PULL = 1
    """From another worker to the device."""
    GIVE = 2
    """From the device to another worker."""
    READ = 3
    """Disk to host, ahead of use."""
    STORE = 4
    """Device to host, written through."""
    WRITE = 5
    """Host to disk."""
    SEND = 6
    """Host to other workers' host memory."""
    SHADOW = 7
    """Blocks of a running sequence, to or from another worker's host memory."""


@dataclass(slots=True)
class RouteFigures:
    """Counts since the start, and open copies."""

    copies: int = 0
    lost: int = 0
    """Failed, given up, or too late."""
    size_bytes: int = 0
    open: int = 0


class Ticket(Generic[T]):
    """One copy, run by the first that claims it: its thread, or a caller that cannot wait for its turn."""

    def __init__(self, route: Route, copy: Callable[[], T], failed: T, until_s: float) -> None:
        """`until_s`, on the monotonic clock: it does not begin later."""
        self.route = route
        self._until_s = until_s
        self.held_until_s = 0.0
        """0: nothing has held it up."""
        self.answer = failed
        self.is_done = False
        """The copy returned, whatever its answer says."""
        self.took_s = 0.0
        self.ended: Callable[[], None] = lambda: None
        """Called on its thread, once it has its answer."""
        self._copy = copy
        self._claim = threading.Lock()
        self._over = threading.Event()

    def claim(self) -> bool:
        """True for the first caller, which runs it or gives it up."""
        return self._claim.acquire(blocking=False)

    def run(self, *, is_wanted: bool = True) -> T:
        """Run a claimed copy. If it raises, or is not wanted, its answer is that of a failure."""
        began_s = perf_counter()
        try:
            if is_wanted and monotonic() <= self._until_s:
                self.answer = self._copy()
                self.is_done = True
        except Exception:  # whatever it was, somebody waits for the answer
            _logger.exception("a copy of KV failed (%s)", self.route.name.lower())
        self.took_s = perf_counter() - began_s
        self._over.set()
        return self.answer

    def give_up(self) -> bool:
        """Drop it unless it has begun; it is answered either way. False: it runs or has ended, and may write
        until `wait` returns True."""
        if not self.claim():
            return False
        self.run(is_wanted=False)
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended; False when it has not in time."""
        return self._over.wait(timeout_s)


_NICENESS = 10
_HOLD_S = 0.02
"""Maximum time that running steps hold up a copy that nothing waits for."""
_LOOK_S = 0.0005
_CLAIMED_S = 60.0
"""Maximum wait for a copy that another thread runs."""
_FINISH_S = 30.0
"""Maximum duration of a copy that has begun."""


class TransferEngine:
    """The copies of one worker. `wake` is called on a copying thread when an answer waits for `settle`;
    `is_reading` returns, on these threads, whether a running step reads from elsewhere."""

    def __init__(
        self, wake: Callable[[], None], *, most_open: int = 64, is_reading: Callable[[], bool] = lambda: False
    ) -> None:
        """`most_open`: maximum number of open tickets of a route."""
        self._wake = wake
        self._most_open = most_open
        self._lock = threading.Lock()
        self._closing = False
        self._answers: deque[Callable[[], None]] = deque()
        self.figures = {route: RouteFigures() for route in Route}
        self._threads = _CopyThread("kv-urgent", is_reading), _CopyThread("kv-polite", is_reading, _NICENESS)

    def start(
        self,
        route: Route,
        copy: Callable[[], T],
        failed: T,
        *,
        size_bytes: int = 0,
        on_ended: Callable[[T], None] | None = None,
        within_s: float = inf,
    ) -> Ticket[T] | None:
        """Queue a copy that begins `within_s` or fails; None when too many are open, or it is closing.
        `on_ended` gets the answer in `settle`, once: `failed` if there is none."""
        with self._lock:
            figures = self.figures[route]
            if self._closing or figures.open >= self._most_open:
                return None
            figures.open += 1
        ticket = Ticket(route, copy, failed, monotonic() + within_s)

        def ended() -> None:
            if on_ended is not None:
                self._answers.append(lambda: on_ended(ticket.answer))
            self._count(ticket, size_bytes)
            if on_ended is not None:
                self._wake()

        ticket.ended = ended
        self._threads[route >= Route.STORE].put(route, ticket)
        return ticket

    def run(self, route: Route, copy: Callable[[], T], failed: T, *, size_bytes: int, within_s: float) -> T:
        """Run a copy and wait for its answer. Raises Overloaded when too many of the route are open, and
        DeadlineExceeded when its turn did not come in time: then nothing was copied."""
        ticket = self.start(route, copy, failed, size_bytes=size_bytes, within_s=within_s)
        if ticket is None:
            raise Overloaded(f"{self._most_open} copies are waiting", retry_after_s=0.1)
        if not ticket.wait(within_s) and ticket.give_up():
            raise DeadlineExceeded(f"no copy could begin within {within_s:g} s")
        return self.finish(ticket)

    def finish(self, ticket: Ticket[T]) -> T:
        """Run that copy now, or wait for its end; its `on_ended` still comes. Raises InternalError when that
        takes too long."""
        if ticket.claim():
            return ticket.run()
        if not ticket.wait(_FINISH_S):
            raise InternalError(f"a copy of KV did not end within {_FINISH_S:g} s")
        return ticket.answer

    @property
    def open_copies(self) -> int:
        """0: every answer waits for `settle`, or was handed over."""
        return sum(each.open for each in self.figures.values())

    def settle(self) -> None:
        """Hand over the answers since the last call, on the thread that owns the blocks."""
        while self._answers:
            self._answers.popleft()()

    def halt(self, deadline_s: float) -> bool:
        """End both threads after their present copies; queued ones are answered as failed. False when one
        did not end in time. Idempotent."""
        with self._lock:
            self._closing = True
        until_s = monotonic() + deadline_s
        for thread in self._threads:
            thread.halt()
        ended = [thread.join(max(0.0, until_s - monotonic())) for thread in self._threads]
        return all(ended)

    def details(self) -> dict[str, object]:
        """For `python -m services status`."""
        moved = [
            f"{route.name.lower()} {each.size_bytes / 1e6:.1f}"
            for route, each in self.figures.items()
            if each.copies
        ]
        return {
            "transferred_mb": ", ".join(moved),
            "transfers_open": self.open_copies,
            "transfers_lost": sum(each.lost for each in self.figures.values()),
        }

    def _count(self, ticket: Ticket[T], size_bytes: int) -> None:
        """Count an ended copy, on its thread."""
        figures, name = self.figures[ticket.route], ticket.route.name.lower()
        with self._lock:
            figures.open -= 1
        if ticket.is_done:
            figures.copies += 1
            figures.size_bytes += size_bytes
            _bytes.labels(name).inc(size_bytes)
            _seconds.labels(name).inc(ticket.took_s)
        else:
            figures.lost += 1
            _lost.labels(name).inc()


class _CopyThread:
    """Runs lower routes first, equal ones in order. With `niceness` it gives way to other threads."""

    def __init__(self, name: str, is_reading: Callable[[], bool], niceness: int = 0) -> None:
        self._is_reading = is_reading
        self._niceness = niceness
        self._queue: PriorityQueue[tuple[int, int, Ticket[Any] | None]] = PriorityQueue()
        self._numbers = itertools.count()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, route: Route, ticket: Ticket[Any]) -> None:
        """Queue a copy. After `halt` it is answered as failed, or never."""
        self._queue.put((route, next(self._numbers), ticket))

    def halt(self) -> None:
        """End after the present copy; queued ones are answered as failed."""
        self._closing.set()
        self._queue.put((_LAST, next(self._numbers), None))

    def join(self, deadline_s: float) -> bool:
        """Wait after `halt`; False when it did not end in time."""
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            _logger.warning("the thread %s did not end within %.1f s", self._thread.name, deadline_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        if self._niceness:
            _be_nice(self._niceness)
        while True:
            route, number, ticket = self._queue.get()
            if ticket is None:
                return
            if self._is_held(ticket):
                self._queue.put((route, number, ticket))  # More urgent ones go first meanwhile.
                self._closing.wait(_LOOK_S)
                continue
            if ticket.claim():
                ticket.run(is_wanted=not self._closing.is_set())
            else:
                ticket.wait(_CLAIMED_S)
            ticket.ended()
            del ticket.ended  # It refers to the ticket, which would wait for a full collection.

    def _is_held(self, ticket: Ticket[Any]) -> bool:
        if ticket.route < Route.READ or self._closing.is_set() or not self._is_reading():
            return False
        ticket.held_until_s = ticket.held_until_s or monotonic() + _HOLD_S
        return monotonic() < ticket.held_until_s


_LAST = 1_000_000


def _be_nice(niceness: int) -> None:
    """Lower the priority of this thread, where the system can."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    except (AttributeError, OSError) as error:
        _logger.debug("a thread could not be made polite: %s", error)
