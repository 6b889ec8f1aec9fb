"""Replies to this process's requests: one wildcard subscription, one token per request. Unlike in nats-py,
pending requests fail at once if the connection is lost or the server refuses the subject."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, TypeVar

import msgspec
from nats.aio.msg import Msg
from nats.micro.request import ERROR_HEADER
from nats.nuid import NUID

from shared.errors import KvasirError, PermissionRefused, from_wire
from shared.messages.base import decode

R = TypeVar("R", bound=msgspec.Struct)


def is_unserved(msg: Msg) -> bool:
    """Return True for the server's notice that the subject has no subscriber."""
    return not msg.data and msg.headers is not None and msg.headers.get("Status") == "503"


def reply_in(msg: Msg, reply: type[R]) -> R:
    """Decode the reply. Raise the peer's error, or InvalidMessage."""
    if msg.headers is not None and ERROR_HEADER in msg.headers:
        raise from_wire(decode(msg.data, dict[str, Any]))
    message: R = decode(msg.data, reply)
    return message


class Gathering(Generic[R]):
    """Collects the replies to one scattered request. `done` is set when it needs, or can get, no more."""

    def __init__(
        self, reply: type[R], expected: int | None, on_error: Callable[[KvasirError], object]
    ) -> None:
        self.replies: list[R] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reply = reply
        self._expected = expected
        self._on_error = on_error

    def on_reply(self, msg: Msg) -> None:
        unserved = is_unserved(msg)
        try:
            self.replies.extend([] if unserved else [reply_in(msg, self._reply)])
        except KvasirError as error:
            self._on_error(error)
        enough = self._expected is not None and len(self.replies) >= self._expected
        if not self.done.done() and (unserved or enough):
            self.done.set_result(None)

    def on_failure(self, error: KvasirError) -> None:
        """Raise a refusal to the caller; after a lost connection, end with the replies so far."""
        if self.done.done():
            return
        if isinstance(error, PermissionRefused):
            self.done.set_exception(error)
        else:
            self.done.set_result(None)


@dataclass(frozen=True)
class _Waiting:
    subject: str
    on_reply: Callable[[Msg], None]
    on_failure: Callable[[KvasirError], None]


class Inbox:
    """Pending requests of one bus."""

    def __init__(self, prefix: str) -> None:
        self._prefix = f"{prefix}.{NUID().next().decode()}."
        self._waiting: dict[str, _Waiting] = {}
        self._tokens = count(1)

    @property
    def subject(self) -> str:
        """Subject to subscribe to, with `on_message` as the callback."""
        return f"{self._prefix}*"

    def open(
        self, subject: str, on_reply: Callable[[Msg], None], on_failure: Callable[[KvasirError], None]
    ) -> str:
        """Return the reply subject for a new request to `subject`; pass it to `close` when done."""
        token = str(next(self._tokens))
        self._waiting[token] = _Waiting(subject, on_reply, on_failure)
        return self._prefix + token

    def open_one(self, subject: str) -> tuple[str, asyncio.Future[Msg]]:
        """Like `open`, for a request with one reply."""
        answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()

        def on_reply(msg: Msg) -> None:
            if not answer.done():
                answer.set_result(msg)

        def on_failure(error: KvasirError) -> None:
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # avoid asyncio's warning if the caller has gone

        return self.open(subject, on_reply, on_failure), answer

    def close(self, reply_subject: str) -> None:
        """Forget the request; late replies are ignored."""
        self._waiting.pop(reply_subject.removeprefix(self._prefix), None)

    async def on_message(self, msg: Msg) -> None:
        """Callback for nats-py."""
        self.take(msg)

    def take(self, msg: Msg) -> None:
        """Dispatch a reply."""
        waiting = self._waiting.get(msg.subject.removeprefix(self._prefix))
        if waiting is not None:
            waiting.on_reply(msg)

    def fail(self, error: KvasirError, subject: str | None = None) -> None:
        """Fail every pending request (to `subject`, if given) with this error."""
        for waiting in list(self._waiting.values()):
            if subject is None or waiting.subject.lower() == subject.lower():
                waiting.on_failure(error)
