"""Small messages that nobody waits for: acknowledgements, cancellations, finished sequences.

One task sends them in order; the queue has a bound and drops its oldest, because heartbeats make every one of
them be said again. Knows nothing of why they are sent.
"""

import asyncio
from collections import deque

import msgspec

from shared import log, metrics, subjects
from shared.bus import Bus
from shared.errors import KvasirError
from shared.messages.sequence import SequenceRef
from shared.messages.tokens import AcknowledgeEnds

MAX_MESSAGES = 10_000
_logger = log.get_logger("gateway.outbox")


class Outbox:
    """Filled from handlers that must not wait, emptied by `run`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._messages: deque[tuple[str, msgspec.Struct]] = deque(maxlen=MAX_MESSAGES)
        self._ended: dict[str, set[SequenceRef]] = {}
        self._filled = asyncio.Event()
        self._dropped = metrics.counter(
            "kvasir_gateway_outbox_dropped_total", "Small messages that could not be sent", ("reason",)
        )

    def put(self, subject: str, message: msgspec.Struct) -> None:
        if len(self._messages) == MAX_MESSAGES:
            self._dropped.labels("full").inc()
        self._messages.append((subject, message))
        self._filled.set()

    def acknowledge(self, worker_id: str, ref: SequenceRef) -> None:
        """Ends seen between two sends travel together, one message per worker."""
        refs = self._ended.setdefault(worker_id, set())
        if len(refs) < MAX_MESSAGES:
            refs.add(ref)
        self._filled.set()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await self._filled.wait()
            await self.flush()

    async def flush(self) -> None:
        """Send what is there now."""
        self._filled.clear()
        while self._messages:
            await self._send(*self._messages.popleft())
        while self._ended:
            worker_id, refs = self._ended.popitem()
            await self._send(subjects.worker_acknowledge(worker_id), AcknowledgeEnds(refs=tuple(refs)))

    async def _send(self, subject: str, message: msgspec.Struct) -> None:
        try:
            await self._bus.publish(subject, message)
        except KvasirError as error:
            self._dropped.labels(error.code).inc()
            _logger.warning("not sent to %s: %s", subject, error)
