"""Every copy of KV between tiers and workers: who goes first, who has given up, and where the answers go.

One thread copies what somebody waits for, another what can wait, and is polite to the engine's:

    a load for a sequence > blocks from and for other workers > reads ahead       (urgent thread)
    stores written through to the host > writes to disk > to peers > shadows    (polite thread)

What a running step brings in from elsewhere, layer by layer, has a thread (`kv.tiers.resident`) or a link
(`peers.attention`) of its own, and goes before all that nobody waits for: that is held until the step is
over, for a while at most. Each copy has a ticket, and each ticket one answer, whatever becomes of it: done,
failed, given up, too late or not begun before the end. Answers wait in one queue for the thread that owns the
blocks (`settle`), so that a place is never given to somebody else while something may still be written to it.
Knows no block, no tier and no link.
"""

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from queue import PriorityQueue
from time import monotonic, perf_counter, sleep
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
        if bytes_per_s < 0:
            raise ValueError("a speed cannot be negative")
        self._bytes_per_s = bytes_per_s

    def wait(self, size_bytes: int, until_s: float = inf) -> bool:
        """Sleep as long as so many bytes need. False, after the time left, if that is past `until_s`
        (monotonic clock)."""
        if not self._bytes_per_s:
            return True
        needed_s, left_s = size_bytes / self._bytes_per_s, until_s - monotonic()
        sleep(max(0.0, min(needed_s, left_s)))
        return needed_s <= left_s


class Route(IntEnum):
    """From where to where, the most urgent first."""

    LOAD = 0
    """Host, peers or disk to the device, for a sequence that waits."""
    PULL = 1
    """From another worker to the device."""
    GIVE = 2
    """From the device to another worker."""
    READ = 3
    """Disk to host, ahead of who will want it."""
    STORE = 4
    """Device to host, written through."""
    WRITE = 5
    """Host to disk."""
    SEND = 6
    """Host to other workers' host memory."""
    SHADOW = 7
    """Of a running sequence, to or from another worker's host memory, should this one or that one die."""

    @property
    def is_waited_for(self) -> bool:
        """By a sequence, here or elsewhere."""
        return self < Route.READ


@dataclass(slots=True)
class RouteFigures:
    """Since the start."""

    copies: int = 0
    lost: int = 0
    """Failed, given up, or too late."""
    size_bytes: int = 0
    took_s: float = 0.0
    open: int = 0
    """Now."""


class Ticket(Generic[T]):
    """One copy: done by whoever claims it, the thread or who cannot wait for its turn."""

    def __init__(self, route: Route, copy: Callable[[], T], failed: T, until_s: float) -> None:
        self.route = route
        self.until_s = until_s
        """On the monotonic clock: not begun later."""
        self.held_until_s = 0.0
        """0: nothing has held it up."""
        self.answer = failed
        self.is_done = False
        """It was copied to its end, by which `answer` may say whatever it likes."""
        self.took_s = 0.0
        self._copy = copy
        self._claim = threading.Lock()
        self._ended = threading.Event()

    def claim(self) -> bool:
        """True for the first who asks: that one runs it, or gives it up."""
        return self._claim.acquire(blocking=False)

    def run(self, *, is_wanted: bool = True) -> T:
        """By who has claimed it. Where it raises, or is not wanted, the answer is that of a failure."""
        began_s = perf_counter()
        try:
            if is_wanted and monotonic() <= self.until_s:
                self.answer = self._copy()
                self.is_done = True
        except Exception:  # whatever it was, somebody waits for the answer
            _logger.exception("a copy of KV failed (%s)", self.route.name.lower())
        self.took_s = perf_counter() - began_s
        self._ended.set()
        return self.answer

    def give_up(self) -> bool:
        """Nobody wants it any more. True: it will never begin. False: it is at it or over, and still writes
        where it was told to until `wait` says that it has ended. It is answered either way."""
        if not self.claim():
            return False
        self.run(is_wanted=False)
        return True

    def wait(self, timeout_s: float) -> bool:
        """Until it has ended; False when it has not in time."""
        return self._ended.wait(timeout_s)


_NICENESS = 10
_HOLD_S = 0.02
"""What nobody waits for is held up by steps for so long at most."""
_LOOK_S = 0.0005
_CLAIMED_S = 60.0
"""Somebody else is at it right now."""
_FINISH_S = 30.0
"""A copy that has begun ends within so long."""


class TransferEngine:
    """One worker's. `wake` is called on a thread that copies when an answer waits for `settle`; `is_reading`
    says, on these threads, whether a running step brings in what it needs."""

    def __init__(
        self,
        wake: Callable[[], None],
        *,
        most_open: int = 64,
        is_reading: Callable[[], bool] = lambda: False,
    ) -> None:
        """`most_open`: tickets of one route at a time."""
        self._wake = wake
        self._most_open = most_open
        self._lock = threading.Lock()
        self._closing = False
        self._answers: deque[Callable[[], None]] = deque()
        self.figures = {route: RouteFigures() for route in Route}
        self._urgent = _CopyThread("kv-urgent", is_reading)
        self._polite = _CopyThread("kv-polite", is_reading, niceness=_NICENESS)

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
        """None when too many of the route are open, or it is closing. `copy` runs on one of the threads if it
        can begin `within_s`; `on_ended` gets the answer in `settle`, once: `failed` where there is none."""
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

        thread = self._urgent if route < Route.STORE else self._polite
        thread.put(route, _Queued(ticket, ended))
        return ticket

    def run(self, route: Route, copy: Callable[[], T], failed: T, *, size_bytes: int, within_s: float) -> T:
        """For threads that wait: the answer. Raises Overloaded when too many of the route are open, and
        DeadlineExceeded when its turn did not come in time: then nothing was copied."""
        ticket = self.start(route, copy, failed, size_bytes=size_bytes, within_s=within_s)
        if ticket is None:
            raise Overloaded(f"{self._most_open} copies are waiting", retry_after_s=0.1)
        if not ticket.wait(within_s) and ticket.give_up():
            raise DeadlineExceeded(f"no copy could begin within {within_s:g} s")
        if not ticket.wait(_FINISH_S):
            raise InternalError(f"a copy of KV did not end within {_FINISH_S:g} s")
        return ticket.answer

    def finish(self, ticket: Ticket[T]) -> T:
        """Returns when that copy has ended, before anything else is copied. Its `on_ended` still comes.
        Raises InternalError when a copy in memory does not end."""
        if ticket.claim():
            return ticket.run()
        if not ticket.wait(_FINISH_S):
            raise InternalError(f"a copy of KV did not end within {_FINISH_S:g} s")
        return ticket.answer

    @property
    def open_copies(self) -> int:
        """At 0 every answer waits for `settle`, or was handed over."""
        return sum(each.open for each in self.figures.values())

    def settle(self) -> None:
        """Hand over the answers since the last call: on the thread that owns the blocks."""
        while self._answers:
            self._answers.popleft()()

    def halt(self, deadline_s: float) -> bool:
        """End both threads after the copies they are at; what is queued is answered as failed. False when
        one did not end in time. Idempotent."""
        with self._lock:
            self._closing = True
        until_s = monotonic() + deadline_s
        threads = (self._urgent, self._polite)
        for thread in threads:
            thread.halt()
        ended = [thread.join(max(0.0, until_s - monotonic())) for thread in threads]
        return all(ended)

    def details(self) -> dict[str, object]:
        """For `python -m services status`."""
        moved = {route: each for route, each in self.figures.items() if each.copies}
        return {
            "transferred_mb": ", ".join(
                f"{route.name.lower()} {each.size_bytes / 1e6:.1f}" for route, each in moved.items()
            ),
            "transfers_open": self.open_copies,
            "transfers_lost": sum(each.lost for each in self.figures.values()),
        }

    def _count(self, ticket: Ticket[T], size_bytes: int) -> None:
        """On the thread that copies: the one of its route."""
        figures, name = self.figures[ticket.route], ticket.route.name.lower()
        with self._lock:
            figures.open -= 1
        if ticket.is_done:
            figures.copies += 1
            figures.size_bytes += size_bytes
            figures.took_s += ticket.took_s
            _bytes.labels(name).inc(size_bytes)
            _seconds.labels(name).inc(ticket.took_s)
        else:
            figures.lost += 1
            _lost.labels(name).inc()


@dataclass(frozen=True, slots=True)
class _Queued:
    ticket: Ticket[Any]
    ended: Callable[[], None]
    """Called on the thread, once the ticket has its answer."""


class _CopyThread:
    """Lower routes first, equal ones in order."""

    def __init__(self, name: str, is_reading: Callable[[], bool], *, niceness: int = 0) -> None:
        """With `niceness` it gives way to other threads where a core is short."""
        self._is_reading = is_reading
        self._niceness = niceness
        self._queue: PriorityQueue[tuple[int, int, _Queued | None]] = PriorityQueue()
        self._numbers = itertools.count()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, route: Route, queued: _Queued) -> None:
        """After `halt` it is answered as failed, or never."""
        self._queue.put((route, next(self._numbers), queued))

    def halt(self) -> None:
        """End after the copy it is at; what is queued is answered as failed."""
        self._closing.set()
        self._queue.put((_LAST, next(self._numbers), None))

    def join(self, deadline_s: float) -> bool:
        """After `halt`: False when it did not end in time."""
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            _logger.warning("the thread %s did not end within %.1f s", self._thread.name, deadline_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        if self._niceness:
            _be_nice(self._niceness)
        while True:
            route, number, queued = self._queue.get()
            if queued is None:
                return
            if self._is_held(queued.ticket):
                self._queue.put((route, number, queued))  # What is more urgent goes before it meanwhile.
                self._closing.wait(_LOOK_S)
                continue
            ticket = queued.ticket
            if ticket.claim():
                ticket.run(is_wanted=not self._closing.is_set())
            else:
                ticket.wait(_CLAIMED_S)
            queued.ended()

    def _is_held(self, ticket: Ticket[Any]) -> bool:
        if ticket.route.is_waited_for or self._closing.is_set() or not self._is_reading():
            return False
        ticket.held_until_s = ticket.held_until_s or monotonic() + _HOLD_S
        return monotonic() < ticket.held_until_s


_LAST = 1_000_000


def _be_nice(niceness: int) -> None:
    """This thread alone, where the system tells threads apart."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    except (AttributeError, OSError) as error:
        _logger.debug("a thread could not be made polite: %s", error)
