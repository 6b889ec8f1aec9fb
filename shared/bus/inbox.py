"""Replies to what this process asked: one wildcard subscription, one token per question.

Unlike nats-py's own, waiting questions fail at once when the connection is lost or the server refuses the
subject.
"""

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
    """The server's own answer when nobody subscribes to the subject."""
    return not msg.data and msg.headers is not None and msg.headers.get("Status") == "503"


def reply_in(msg: Msg, reply: type[R]) -> R:
    """Raises the error that the peer raised, or InvalidMessage."""
    if msg.headers is not None and ERROR_HEADER in msg.headers:
        raise from_wire(decode(msg.data, dict[str, Any]))
    message: R = decode(msg.data, reply)
    return message


class Gathering(Generic[R]):
    """The answers to one question to many. `done` is set when no more are wanted or possible."""

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
        """A refusal is the caller's to know; a lost connection ends the gathering with what there is."""
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
    """The open questions of one bus."""

    def __init__(self, prefix: str) -> None:
        self._prefix = f"{prefix}.{NUID().next().decode()}."
        self._waiting: dict[str, _Waiting] = {}
        self._tokens = count(1)

    @property
    def subject(self) -> str:
        """What to subscribe to, with `on_message` as the callback."""
        return f"{self._prefix}*"

    def open(
        self, subject: str, on_reply: Callable[[Msg], None], on_failure: Callable[[KvasirError], None]
    ) -> str:
        """The reply subject of a new question about `subject`; pass it to `close` when done."""
        token = str(next(self._tokens))
        self._waiting[token] = _Waiting(subject, on_reply, on_failure)
        return self._prefix + token

    def open_one(self, subject: str) -> tuple[str, asyncio.Future[Msg]]:
        """Like `open`, for a question with one answer."""
        answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()

        def on_reply(msg: Msg) -> None:
            if not answer.done():
                answer.set_result(msg)

        def on_failure(error: KvasirError) -> None:
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # nobody may be waiting any more; that is no warning's business

        return self.open(subject, on_reply, on_failure), answer

    def close(self, reply_subject: str) -> None:
        """Forget the question; a late answer is ignored."""
        self._waiting.pop(reply_subject.removeprefix(self._prefix), None)

    async def on_message(self, msg: Msg) -> None:
        """As nats-py wants its callbacks."""
        self.take(msg)

    def take(self, msg: Msg) -> None:
        """A reply."""
        waiting = self._waiting.get(msg.subject.removeprefix(self._prefix))
        if waiting is not None:
            waiting.on_reply(msg)

    def fail(self, error: KvasirError, subject: str | None = None) -> None:
        """Every open question (about `subject`, if one is named) ends with this error."""
        for waiting in list(self._waiting.values()):
            if subject is None or waiting.subject.lower() == subject.lower():
                waiting.on_failure(error)
