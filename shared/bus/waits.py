"""Work that waits for the server: it ends when the connection is lost or the server refuses it, not at its
timeout.

Knows no NATS; the link says what happened.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from shared.errors import KvasirError

T = TypeVar("T")


@dataclass(eq=False)
class _Wait:
    task: asyncio.Task[Any]
    publishes: tuple[str, ...]
    error: KvasirError | None = None

    def fail(self, error: KvasirError) -> None:
        if not self.task.done():
            self.error = error
            self.task.cancel()


class Waits:
    """The waiting tasks of one connection."""

    def __init__(self) -> None:
        self._waiting: dict[_Wait, None] = {}  # In order: whoever waits longest is told first.

    async def result(self, work: Coroutine[Any, Any, T], publishes: tuple[str, ...] = ()) -> T:
        """What `work` returns or raises, or the error it was failed with. `publishes` are the beginnings of
        the subjects that it publishes to."""
        wait = self._start(work, publishes)
        try:
            await asyncio.wait({wait.task})
            if wait.error is not None:
                raise wait.error
            result: T = wait.task.result()
            return result
        finally:
            wait.task.cancel()

    async def is_done_within(self, work: Coroutine[Any, Any, Any], limit_s: float) -> bool:
        """Whether `work` ends well in time. Unfinished work goes on: cancelling may harm what it waits in."""
        task = self._start(work, ()).task
        await asyncio.wait({task}, timeout=limit_s)
        return task.done() and not task.cancelled() and task.exception() is None

    def fail_all(self, error: KvasirError) -> None:
        """The connection is lost."""
        for wait in self._waiting:
            wait.fail(error)

    def fail_publishers(self, subject: str, error: KvasirError) -> None:
        """The server refused to publish to `subject`, which it spells in lower case."""
        for wait in self._waiting:
            if any(subject.startswith(beginning.lower()) for beginning in wait.publishes):
                wait.fail(error)

    def _start(self, work: Coroutine[Any, Any, Any], publishes: tuple[str, ...]) -> _Wait:
        wait = _Wait(asyncio.get_running_loop().create_task(work), publishes)
        self._waiting[wait] = None

        def forget(task: asyncio.Task[Any]) -> None:
            self._waiting.pop(wait, None)
            if not task.cancelled():
                task.exception()  # seen, also when nobody waits any more

        wait.task.add_done_callback(forget)
        return wait
