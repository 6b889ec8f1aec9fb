"""Handler tables, and the lanes their handlers run in.

nats-py calls back serially, one message after the other per subscription; lanes make that concurrent within a
bound, keep what waits in order of arrival and refuse what exceeds the bound. Knows nothing of NATS.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Generic, TypeVar

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from shared.errors import InvalidMessage
from shared.messages.base import Empty, Message
from shared.subjects import checked_id, instance_status, status


def handle_inline(subscription: Subscription, handle: Callable[[Msg], None]) -> None:
    """Let `handle` take each message of a fresh subscription; it must not raise."""

    def take(msg: Msg) -> None:
        subscription._pending_size -= len(msg.data)
        handle(msg)

    subscription._pending_queue.put_nowait = take  # type: ignore[assignment, method-assign]


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
    sender: str | None = None
    """The field of the request that says who sends it (`spec.gateway_id`). The subject has to end in the same
    name, which NATS has checked."""


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
    sender: str | None = None
    """As of an `Endpoint`."""


Handler = Endpoint | Gatherable | Listener


def subject_for(subject: Subject, instance: str) -> str:
    """The subject a handler of this instance serves."""
    return subject if isinstance(subject, str) else subject(checked_id(instance))


def status_handlers(service: str) -> tuple[Handler, ...]:
    """`async def status(self, _: Empty)`: for the operator, who asks every instance at once, and for this
    instance's own health check."""
    own = Endpoint(partial(instance_status, service), Empty, "status")
    return (Gatherable(status(service), Empty, "status"), own)


def sender_check(field: str | None) -> Callable[[str, Any], None]:
    """Raises InvalidMessage for a message on a subject that does not end in what its `field` says."""
    if field is None:
        return lambda subject, message: None
    named = attrgetter(field)

    def check(subject: str, message: Any) -> None:
        if (claimed := named(message)) != subject.rpartition(".")[2]:
            raise InvalidMessage(f"{subject}: its sender calls itself {claimed!r}")

    return check


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
