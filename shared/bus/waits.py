"""Pending calls to the server that fail at once when the connection is lost or the server refuses them.

Independent of NATS; the link reports these events.
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
    """Pending tasks of one connection."""

    def __init__(self) -> None:
        self._waiting: dict[_Wait, None] = {}  # ordered: the oldest wait fails first

    async def result(self, work: Coroutine[Any, Any, T], publishes: tuple[str, ...] = ()) -> T:
        """Return or raise the outcome of `work`, or raise the error that it was failed with. `publishes`
        lists prefixes of the subjects that it publishes to."""
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
        """Return True if `work` succeeds in time. Late work is not cancelled."""
        task = self._start(work, ()).task
        await asyncio.wait({task}, timeout=limit_s)
        return task.done() and not task.cancelled() and task.exception() is None

    def fail_all(self, error: KvasirError) -> None:
        """Fail all waits, because the connection is lost."""
        for wait in self._waiting:
            wait.fail(error)

    def fail_publishers(self, subject: str, error: KvasirError) -> None:
        """Fail the waits that publish to `subject`, which is in lower case."""
        for wait in self._waiting:
            if any(subject.startswith(beginning.lower()) for beginning in wait.publishes):
                wait.fail(error)

    def _start(self, work: Coroutine[Any, Any, Any], publishes: tuple[str, ...]) -> _Wait:
        wait = _Wait(asyncio.get_running_loop().create_task(work), publishes)
        self._waiting[wait] = None

        def forget(task: asyncio.Task[Any]) -> None:
            self._waiting.pop(wait, None)
            if not task.cancelled():
                task.exception()  # avoid asyncio's warning if nobody awaits the task

        wait.task.add_done_callback(forget)
        return wait
