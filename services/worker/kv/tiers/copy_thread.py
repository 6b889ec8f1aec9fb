"""A thread that copies, the most urgent first, and an answer for everything it was given. Knows no tier."""

import itertools
import os
import threading
from collections.abc import Callable
from queue import PriorityQueue
from typing import Protocol

from services.worker.kv.core.prefix_cache import PrefixCache
from shared.log import get_logger

_logger = get_logger("worker.kv")


class Ended(Protocol):
    """A copy is over; how it ended is for the cache to know."""

    def apply(self, cache: PrefixCache) -> None:
        """On the cache's own thread, once."""
        ...


class CopyJob:
    """One copy: done by whoever claims it, the thread or who cannot wait for its turn."""

    def __init__(self, copy: Callable[[], Ended], failed: Ended, ended: Callable[[], None]) -> None:
        """`failed` is the answer where `copy` raises, or is not begun before the end; `ended` is called once
        the answer has been taken note of."""
        self._copy = copy
        self.on_answered = ended
        self._claim = threading.Lock()
        self._ended = threading.Event()
        self.answer = failed

    def claim(self) -> bool:
        """True for the first who asks: that one runs it."""
        return self._claim.acquire(blocking=False)

    def run(self, *, is_wanted: bool = True) -> Ended:
        """By who has claimed it."""
        try:
            if is_wanted:
                self.answer = self._copy()
        except Exception:  # whatever it was, somebody waits for the answer
            _logger.exception("a copy between KV tiers failed")
        self._ended.set()
        return self.answer

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Until it has ended; False when it has not in time."""
        return self._ended.wait(timeout_s)


class CopyThread:
    """`on_done` is called on it with each answer, in the order in which the copies end."""

    def __init__(self, name: str, on_done: Callable[[Ended], None], *, niceness: int = 0) -> None:
        """With `niceness` it gives way to other threads where a core is short."""
        self._on_done = on_done
        self._niceness = niceness
        self._queue: PriorityQueue[tuple[int, int, CopyJob | None]] = PriorityQueue()
        self._numbers = itertools.count()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, priority: int, job: CopyJob) -> None:
        """Lower priorities first, equal ones in order. After `halt` it is answered as failed, or never."""
        self._queue.put((priority, next(self._numbers), job))

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
        while (job := self._queue.get()[2]) is not None:
            if job.claim():
                job.run(is_wanted=not self._closing.is_set())
            else:
                job.wait(_CLAIMED_S)
            self._on_done(job.answer)
            job.on_answered()


_LAST = 1_000_000
_CLAIMED_S = 60.0
"""Somebody else is at it right now."""


def _be_nice(niceness: int) -> None:
    """This thread alone, where the system tells threads apart."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    except (AttributeError, OSError) as error:
        _logger.debug("a thread could not be made polite: %s", error)
