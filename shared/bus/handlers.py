"""Handler tables, and the lanes their handlers run in.

nats-py calls back serially, one message after the other per subscription; lanes make that concurrent within a
bound, keep what waits in order of arrival and refuse what exceeds the bound. Knows nothing of NATS.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from shared.messages.base import Message
from shared.subjects import checked_id

Subject = str | Callable[[str], str]
"""A subject, or a function of `shared.subjects` that is called with the instance id."""


@dataclass(frozen=True)
class Endpoint:
    """A command with a reply, served as a NATS micro endpoint: one instance of the service answers.

    `async def method(self, message) -> Message`; a `KvasirError` it raises reaches the caller with its type.
    """

    subject: Subject
    request: type[Message]
    method: str
    concurrency: int = 64
    pending_limit: int = 1024
    """Requests that may wait for a lane; one more is answered `Overloaded`."""


@dataclass(frozen=True)
class Gatherable:
    """Like `Endpoint`, but every instance answers."""

    subject: Subject
    request: type[Message]
    method: str
    concurrency: int = 4
    pending_limit: int = 64


@dataclass(frozen=True)
class Listener:
    """An event, or a command without a reply: `async def` or `def method(self, message) -> None`.

    A plain `def` runs inside the read loop, the cheapest way: it must be quick. What an `async def` cannot
    keep up with is dropped beyond `pending_limit`, counted and logged.
    """

    subject: Subject
    message: type[Any]
    method: str
    concurrency: int = 1
    """1 is strictly in order."""
    queue: str | None = None
    """With a name, only one subscriber of that name gets each message."""
    pending_limit: int = 16_384


Handler = Endpoint | Gatherable | Listener


def subject_for(subject: Subject, instance: str) -> str:
    """The subject a handler of this instance serves."""
    return subject if isinstance(subject, str) else subject(checked_id(instance))


T = TypeVar("T")


class Lanes(Generic[T]):
    """Runs `work(item)` for each item offered: at most `concurrency` at once, started in order of arrival."""

    def __init__(self, work: Callable[[T], Awaitable[None]], concurrency: int, pending_limit: int) -> None:
        self._work = work
        self._concurrency = concurrency
        self._pending_limit = pending_limit
        self._pending: deque[T] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pending(self) -> int:
        return len(self._pending)

    def offer(self, item: T) -> bool:
        """False, and the item is not taken, when `pending_limit` items wait already."""
        if len(self._tasks) < self._concurrency:
            task = asyncio.get_running_loop().create_task(self._lane(item))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return True
        if len(self._pending) >= self._pending_limit:
            return False
        self._pending.append(item)
        return True

    async def stop(self, deadline_s: float) -> None:
        """Let what runs and waits finish within the deadline, then cancel it. Offer nothing afterwards."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=deadline_s)
        self._pending.clear()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)

    async def _lane(self, item: T) -> None:
        await self._work(item)
        while self._pending:
            await self._work(self._pending.popleft())
