"""Publishes a worker's frames and step reports in order, and its heartbeats.

`Courier` sends from the engine's thread, or through the event loop by `Outbox` without an express connection.
Messages may be lost: a gateway fetches missing tokens, a scheduler resynchronises on a gap. During a long
step the heartbeat repeats the last report, so that a long prefill does not look like a dead worker. If the
engine is stuck, the worker ends."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec

from services.worker.core.steps import StepEffects
from shared import subjects
from shared.bus import Bus, Express
from shared.errors import InternalError, KvasirError
from shared.log import detail, get_logger
from shared.messages.plans import WorkerStepped
from shared.messages.reports import WorkerReported
from shared.metrics import counter, histogram

Addressed = tuple[str, msgspec.Struct]
"""A subject and the message for it."""
_MAX_WAITING = 8192
_log = get_logger("worker.outbox")

_tokens = counter("kvasir_worker_tokens_total", "Tokens computed, by kind of work.", ["kind"])
_prefilled, _decoded = _tokens.labels("prefill"), _tokens.labels("decode")
_step_seconds = histogram("kvasir_worker_step_seconds", "Duration of one iteration.")
_lost = counter("kvasir_worker_messages_lost_total", "Frames and step reports that could not be sent.")
_dropped = counter("kvasir_worker_final_frames_dropped_total", "Frames dropped by fault_drop_final_frames.")


class Outbox:
    """A bounded queue of messages that `drain` publishes on the bus."""

    def __init__(self, bus: Bus, *, drop_final_frames: bool = False) -> None:
        self._bus = bus
        self._drop_final_frames = drop_final_frames
        self.waiting: deque[Addressed] = deque()
        self._filled = asyncio.Event()

    def addressed(self, effects: StepEffects) -> list[Addressed]:
        """Return the messages of a step with their subjects, in order. Any thread may call this."""
        frames = effects.frames
        if self._drop_final_frames:
            frames = tuple(each for each in frames if not any(d.finish_reason for d in each.frame.deltas))
            _dropped.inc(len(effects.frames) - len(frames))
        messages: list[Addressed] = [
            (subjects.tokens(each.gateway_id, each.frame.worker_id), each.frame) for each in frames
        ]
        messages += [(subjects.worker_stepped(each.worker_id), each) for each in effects.stepped]
        if effects.observed is not None:
            messages.append((subjects.worker_observed(effects.observed.worker_id), effects.observed))
        return messages

    def put(self, messages: Sequence[Addressed]) -> None:
        """Enqueue messages; a full queue drops and counts them. Called on the event loop's thread."""
        for message in messages:
            if len(self.waiting) >= _MAX_WAITING:
                _lost.inc()
            else:
                self.waiting.append(message)
        self._filled.set()

    async def drain(self) -> None:
        """Publish queued messages until cancelled."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self.waiting:
                subject, message = self.waiting.popleft()
                try:
                    await self._bus.publish(subject, message)
                except KvasirError as error:
                    _lost.inc()
                    _log.warning("%s not sent: %s", type(message).__name__, error)


def _log_ends(stepped: WorkerStepped) -> None:
    """Log one line per ended sequence; too slow for the engine's thread."""
    for ended in stepped.ended:
        detail(
            _log,
            "sequence ended",
            request=ended.ref.request_id,
            choice=ended.ref.choice,
            attempt=ended.ref.attempt,
            reason=ended.finish_reason,
            generated_tokens=ended.generated_tokens,
        )


class Courier:
    """Sends frames and reports over an express connection, or through the outbox without one. The engine's
    thread calls `deliver` and `attend`, the event loop `offer` and `wants_express`. Call `close` after the
    engine's thread has ended."""

    def __init__(self, outbox: Outbox, on_loop: Callable[[Callable[[], None]], None]) -> None:
        """`on_loop` schedules a call on the event loop, from any thread."""
        self._outbox = outbox
        self._on_loop = on_loop
        self._express: Express | None = None
        self._offered: deque[Express] = deque()

    @property
    def wants_express(self) -> bool:
        return not self._offered and (self._express is None or not self._express.is_up)

    def offer(self, express: Express) -> None:
        """Replace the express connection."""
        self._offered.append(express)

    def deliver(self, effects: StepEffects) -> None:
        """Send frames and reports in order."""
        messages = self._outbox.addressed(effects)
        self._take_up()
        if self._express is None or not self._express.publish(messages):
            self._on_loop(lambda: self._outbox.put(messages))
        for stepped in effects.stepped:
            if stepped.prefilled_tokens or stepped.decoded_tokens:
                _prefilled.inc(stepped.prefilled_tokens)
                _decoded.inc(stepped.decoded_tokens)
                _step_seconds.observe(stepped.step_s)
            if stepped.ended:
                self._on_loop(partial(_log_ends, stepped))

    def attend(self) -> None:
        """Keep the connection alive; called a few times a second."""
        self._take_up()
        if self._express is not None:
            self._express.attend()

    def close(self) -> None:
        for express in (self._express, *self._offered):
            if express is not None:
                express.close()

    def _take_up(self) -> None:
        """Switch to an offered connection, once the outbox is empty, so that no message overtakes another."""
        while self._offered and not self._outbox.waiting:
            if self._express is not None:
                self._express.close()
            self._express = self._offered.popleft()


class Heartbeat:
    """Completes the reports of one incarnation and numbers them from 1. Used on the event loop's thread."""

    def __init__(
        self,
        ask: Callable[[], "Future[WorkerReported]"],
        sections: Callable[[WorkerReported], Mapping[str, Any]] = lambda _: {},
        *,
        interval_s: float,
        is_stuck: Callable[[], bool] = lambda: False,
    ) -> None:
        """`sections` returns the fields that do not come from the engine's thread."""
        self._ask = ask
        self._sections = sections
        self._interval_s = interval_s
        self._is_stuck = is_stuck
        self._pending: Future[WorkerReported] | None = None
        self._last: WorkerReported | None = None
        self._seq = 0

    def number(self, report: WorkerReported) -> WorkerReported:
        """Return the report with all sections and the next number, and keep it as the latest."""
        self._seq += 1
        self._last = report
        return msgspec.structs.replace(report, seq=self._seq, **self._sections(report))

    async def next(self) -> WorkerReported | None:
        """Return the next report: a new one within the interval, else the last again, else None. Raises
        InternalError if the engine's thread is stuck."""
        if self._pending is None:
            self._pending = self._ask()
        waiting = asyncio.wrap_future(self._pending)
        done, _ = await asyncio.wait({waiting}, timeout=self._interval_s)
        if done:
            self._pending = None
            return self.number(waiting.result())
        if self._is_stuck():
            raise InternalError("the engine's thread is stuck")
        return None if self._last is None else self.number(self._last)
