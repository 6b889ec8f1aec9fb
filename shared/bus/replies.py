"""Reading what came back: replies, errors that a peer raised, the server's word that nobody serves that."""

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
from nats.aio.msg import Msg
from nats.micro.request import ERROR_HEADER

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
