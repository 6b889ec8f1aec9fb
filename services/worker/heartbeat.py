"""The worker's heartbeat: a report at a fixed interval, however long an iteration takes.

The report comes from the engine's thread. While that is busy with a long iteration the last report is sent
again, so that nobody takes a long prefill for a death; when it stays silent for too long the worker gives
itself up.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import msgspec

from shared.errors import InternalError
from shared.messages.reports import WorkerReported

Ask = Callable[[], "Future[WorkerReported]"]
Sections = Callable[[WorkerReported], Mapping[str, Any]]
"""What others than the engine's thread say in a heartbeat, by field."""


class Heartbeat:
    """Completes and numbers every report of one incarnation, from 1. Used on the event loop's thread only."""

    def __init__(
        self, ask: Ask, sections: Sections = lambda _: {}, *, interval_s: float, stall_timeout_s: float
    ) -> None:
        self._ask = ask
        self._sections = sections
        self._interval_s = interval_s
        self._stall_timeout_s = stall_timeout_s
        self._pending: Future[WorkerReported] | None = None
        self._last: WorkerReported | None = None
        self._seq = 0
        self._stalled_s = 0.0

    def number(self, report: WorkerReported) -> WorkerReported:
        """What the engine's thread said, with all sections and the next number; the latest from now on."""
        self._seq += 1
        self._last = report
        return msgspec.structs.replace(report, seq=self._seq, **self._sections(report))

    async def next(self) -> WorkerReported | None:
        """What to send now, waiting up to the interval for a fresh report; None before the first there is.

        Raises InternalError when the engine gave none for `stall_timeout_s` (counted in time awake).
        """
        if self._pending is None:
            self._pending = self._ask()
        waiting = asyncio.wrap_future(self._pending)
        done, _ = await asyncio.wait({waiting}, timeout=self._interval_s)
        if done:
            self._pending = None
            self._stalled_s = 0.0
            return self.number(waiting.result())
        self._stalled_s += self._interval_s
        if self._stalled_s >= self._stall_timeout_s:
            raise InternalError(f"the engine has answered nothing for {self._stalled_s:.0f} s")
        return None if self._last is None else self.number(self._last)
