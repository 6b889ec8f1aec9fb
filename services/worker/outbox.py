"""What leaves a worker: frames and step reports, in order, from the engine's thread to the bus.

Nothing here is delivered for certain: a gateway fetches what it misses, a scheduler resynchronises on a gap.
"""

import asyncio
from collections import deque

import msgspec

from services.worker.frames import without_ends
from services.worker.steps import Effects
from shared import subjects
from shared.bus import Bus
from shared.errors import KvasirError
from shared.log import canonical, get_logger
from shared.messages.plans import WorkerStepped
from shared.metrics import counter, histogram

_MAX_WAITING = 8192
_log = get_logger("worker.outbox")

_tokens = counter("kvasir_worker_tokens_total", "Tokens computed, by kind of work.", ["kind"])
_step_seconds = histogram("kvasir_worker_step_seconds", "Duration of one iteration.")
_lost = counter("kvasir_worker_messages_lost_total", "Frames and step reports that could not be sent.")
_dropped = counter("kvasir_worker_final_frames_dropped_total", "Frames dropped by fault_drop_final_frames.")


class Outbox:
    """A bounded queue and the task that empties it onto the bus."""

    def __init__(self, bus: Bus, *, drop_final_frames: bool = False) -> None:
        self._bus = bus
        self._drop_final_frames = drop_final_frames
        self._waiting: deque[tuple[str, msgspec.Struct]] = deque()
        self._filled = asyncio.Event()

    def put(self, effects: Effects) -> None:
        """Take effects over; on the event loop's thread."""
        frames = effects.frames
        if self._drop_final_frames:
            frames = without_ends(frames)
            _dropped.inc(len(effects.frames) - len(frames))
        for addressed in frames:
            self._add(subjects.tokens(addressed.gateway_id), addressed.frame)
        for stepped in effects.stepped:
            _note(stepped)
            self._add(subjects.worker_stepped(stepped.worker_id), stepped)
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

    def _add(self, subject: str, message: msgspec.Struct) -> None:
        if len(self._waiting) >= _MAX_WAITING:
            _lost.inc()
            return
        self._waiting.append((subject, message))


def _note(stepped: WorkerStepped) -> None:
    if stepped.prefilled_tokens or stepped.decoded_tokens:
        _tokens.labels("prefill").inc(stepped.prefilled_tokens)
        _tokens.labels("decode").inc(stepped.decoded_tokens)
        _step_seconds.observe(stepped.step_s)
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
