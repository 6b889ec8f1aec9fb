"""What leaves a worker: frames and step reports in order, and a heartbeat at a fixed interval.

Frames and reports go from the engine's thread by `Courier`, or, where it cannot, through the event loop by
`Outbox`. Nothing here is delivered for certain: a gateway fetches what it misses, a scheduler resynchronises
on a gap. The heartbeat's report comes from the engine's thread. While that is busy with a long iteration the
last report is sent again, so that nobody takes a long prefill for a death; when it stays silent for too long
the worker gives itself up.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec

from services.worker.core.frames import without_ends
from services.worker.core.steps import StepEffects
from shared import subjects
from shared.bus import Bus, Express
from shared.errors import InternalError, KvasirError
from shared.log import canonical, get_logger
from shared.messages.plans import WorkerStepped
from shared.messages.reports import WorkerReported
from shared.metrics import counter, histogram

Addressed = tuple[str, msgspec.Struct]
"""A subject and what goes there."""
_MAX_WAITING = 8192
_log = get_logger("worker.outbox")

_tokens = counter("kvasir_worker_tokens_total", "Tokens computed, by kind of work.", ["kind"])
_prefilled, _decoded = _tokens.labels("prefill"), _tokens.labels("decode")
_step_seconds = histogram("kvasir_worker_step_seconds", "Duration of one iteration.")
_lost = counter("kvasir_worker_messages_lost_total", "Frames and step reports that could not be sent.")
_dropped = counter("kvasir_worker_final_frames_dropped_total", "Frames dropped by fault_drop_final_frames.")


class Outbox:
    """A bounded queue and the task that empties it onto the bus."""

    def __init__(self, bus: Bus, *, drop_final_frames: bool = False) -> None:
        self._bus = bus
        self._drop_final_frames = drop_final_frames
        self._waiting: deque[Addressed] = deque()
        self._filled = asyncio.Event()

    @property
    def is_empty(self) -> bool:
        """Whether everything put here has been handed to the bus."""
        return not self._waiting

    def addressed(self, effects: StepEffects) -> list[Addressed]:
        """What is to be sent where, in order; on any thread."""
        frames = effects.frames
        if self._drop_final_frames:
            frames = without_ends(frames)
            _dropped.inc(len(effects.frames) - len(frames))
        messages: list[Addressed] = [
            (subjects.tokens(each.gateway_id, each.frame.worker_id), each.frame) for each in frames
        ]
        messages += [(subjects.worker_stepped(each.worker_id), each) for each in effects.stepped]
        if effects.observed is not None:
            messages.append((subjects.worker_observed(effects.observed.worker_id), effects.observed))
        return messages

    def put(self, messages: Sequence[Addressed]) -> None:
        """Take messages over; on the event loop's thread."""
        for message in messages:
            if len(self._waiting) >= _MAX_WAITING:
                _lost.inc()
            else:
                self._waiting.append(message)
        self._filled.set()

    async def drain(self) -> None:
        """Publish what is put here, for ever."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._waiting:
                subject, message = self._waiting.popleft()
                try:
                    await self._bus.publish(subject, message)
                except KvasirError as error:
                    _lost.inc()
                    _log.warning("%s not sent: %s", type(message).__name__, error)


def count(stepped: WorkerStepped) -> None:
    """For the metrics; on any thread."""
    if stepped.prefilled_tokens or stepped.decoded_tokens:
        _prefilled.inc(stepped.prefilled_tokens)
        _decoded.inc(stepped.decoded_tokens)
        _step_seconds.observe(stepped.step_s)


def log_ends(stepped: WorkerStepped) -> None:
    """One line for each sequence that ended; too slow for the engine's thread."""
    for ended in stepped.ended:
        canonical(
            _log,
            "sequence ended",
            request=ended.ref.request_id,
            choice=ended.ref.choice,
            attempt=ended.ref.attempt,
            reason=ended.finish_reason,
            generated_tokens=ended.generated_tokens,
        )


OnLoop = Callable[[Callable[[], None]], None]
"""Has the event loop call something soon."""


class Courier:
    """`deliver` and `attend` belong to the engine's thread, `offer` and `wants_express` to the loop's.

    `close` comes when the engine's thread has ended.
    """

    def __init__(self, outbox: Outbox, on_loop: OnLoop) -> None:
        self._outbox = outbox
        self._on_loop = on_loop
        self._express: Express | None = None
        self._offered: deque[Express] = deque()

    @property
    def wants_express(self) -> bool:
        return not self._offered and (self._express is None or not self._express.is_up)

    def offer(self, express: Express) -> None:
        """Use this one from now on, in place of any other."""
        self._offered.append(express)

    def deliver(self, effects: StepEffects) -> None:
        """Send frames and reports, in their order."""
        messages = self._outbox.addressed(effects)
        self._take_up()
        if self._express is None or not self._express.publish(messages):
            self._on_loop(lambda: self._outbox.put(messages))
        for stepped in effects.stepped:
            count(stepped)
            if stepped.ended:
                self._on_loop(partial(log_ends, stepped))

    def attend(self) -> None:
        """A few times a second, also when there is nothing to deliver."""
        self._take_up()
        if self._express is not None:
            self._express.attend()

    def close(self) -> None:
        for express in (self._express, *self._offered):
            if express is not None:
                express.close()

    def _take_up(self) -> None:
        """Only when nothing waits in the loop that a new connection would overtake."""
        while self._offered and self._outbox.is_empty:
            if self._express is not None:
                self._express.close()
            self._express = self._offered.popleft()


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
