"""When somebody was last heard of a stream's sequence, and what its silence asks for. Pure."""

from services.gateway.core.effects import StreamTiming
from shared.errors import DeadlineExceeded

MAX_AUDIT_FACTOR = 4
"""Audits come ever more rarely, up to so many times `frame_timeout_s` apart."""


class Signs:
    """Of one stream: from anyone, and from the worker that serves it."""

    def __init__(self, timing: StreamTiming, now_s: float) -> None:
        self._timing = timing
        self._anyone_s = self._worker_s = now_s
        self._audit_s = timing.frame_timeout_s

    def on_scheduler(self, now_s: float) -> None:
        self._anyone_s = now_s

    def on_worker(self, now_s: float) -> None:
        self._anyone_s = self._worker_s = now_s
        self.begin_anew()

    def begin_anew(self) -> None:
        """The next audit comes as early as the first."""
        self._audit_s = self._timing.frame_timeout_s

    def error(self, now_s: float) -> DeadlineExceeded | None:
        """What the stream fails with, when nobody has answered for so long."""
        waited_s = self._timing.give_up_s
        if now_s - self._anyone_s < waited_s:
            return None
        return DeadlineExceeded(f"no worker or scheduler answered for {waited_s:g} s")

    def is_worker_silent(self, now_s: float) -> bool:
        """For so long that the sequence is handed over."""
        return now_s - self._worker_s >= 2 * self._timing.frame_timeout_s

    def is_audit_due(self, now_s: float) -> bool:
        """Whether to submit again, to see that anybody knows the sequence; asked for rarely as it goes on."""
        if now_s - self._anyone_s < self._audit_s:
            return False
        self._audit_s = min(2 * self._audit_s, MAX_AUDIT_FACTOR * self._timing.frame_timeout_s)
        return True

    def check_integrity(self) -> None:
        """AssertionError where audits are further apart than allowed."""
        assert self._audit_s <= MAX_AUDIT_FACTOR * self._timing.frame_timeout_s
