"""Answers status requests on the bus while a worker loads its model."""

from services.worker.engine.progress import Progress
from shared.bus import Bus, status_handlers, status_of
from shared.clock import monotonic_s
from shared.messages.base import Empty
from shared.messages.reports import ServiceStatus


class Loading:
    """Status endpoint of a worker that has no engine yet."""

    def __init__(self, bus: Bus, progress: Progress) -> None:
        self._bus = bus
        self._progress = progress
        self._began_s = monotonic_s()
        self._handlers = status_handlers("worker")

    async def status(self, _: Empty) -> ServiceStatus:
        details = {"loading": self._progress.text}
        return status_of(self._bus, "worker", monotonic_s() - self._began_s, details)

    async def listen(self) -> None:
        await self._bus.attach(self._handlers, self)

    async def close(self) -> None:
        await self._bus.detach(self._handlers, self)
