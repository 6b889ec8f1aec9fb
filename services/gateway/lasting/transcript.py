"""Record of an answer: one task writes it as an ASGI application; any number of connections read it. A reader
starts at the beginning or after an event, and follows to the end."""

import asyncio
import re
from collections.abc import Awaitable, MutableMapping
from typing import Any

from starlette.types import Message, Send

from services.gateway.errors import HttpError
from shared.errors import InternalError

_NUMBER = re.compile(rb'\Aevent: [^\n]*\ndata: \{"type":"[^"]*","sequence_number":(\d+)')
_END = b"\n\n"


class EventsAfter:
    """Drops a response's events up to a number."""

    def __init__(self, number: int) -> None:
        """-1 drops none."""
        self._number = number
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """Return the events to send; an incomplete last event is held."""
        if self._number < 0:
            return piece
        *events, self._rest = (self._rest + piece).split(_END)
        kept = []
        for event in events:
            found = _NUMBER.match(event)
            if found is None or int(found[1]) > self._number:
                kept.append(event + _END)
        return b"".join(kept)


class Transcript:
    """The bytes of one answer, readable while they are written."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.is_over = False
        self.failure: Exception | None = None
        self._start: MutableMapping[str, Any] | None = None
        self._news = asyncio.Event()

    @property
    def has_begun(self) -> bool:
        return self._start is not None

    async def send(self, message: Message) -> None:
        """ASGI `send` of the writing task."""
        if message["type"] == "http.response.start":
            self._start = message
        else:
            self.body += message.get("body", b"")
            self.is_over = not message.get("more_body", False)
        self._tell()

    def end(self, failure: Exception | None = None) -> None:
        """End the answer. If it has not begun, readers get `failure`."""
        self.failure = failure
        self.is_over = True
        self._tell()

    async def ended(self) -> None:
        """Wait for the end."""
        while not self.is_over:
            await self._news.wait()

    async def read(self, send: Send, until_gone: Awaitable[None], after: int = -1) -> bool:
        """Send the answer up to its end; return False if the reader disconnects first. Raises the failure of
        an answer that never began, and HttpError for `after` without events."""
        gone = asyncio.ensure_future(until_gone)
        events, at, has_begun = EventsAfter(after), 0, False
        try:
            while not gone.done():
                news = self._news
                if self._start is None and self.is_over:
                    raise self.failure or InternalError("an answer ended before it began")
                if self._start is not None and not has_begun:
                    headers = dict(self._start.get("headers", ()))
                    if after >= 0 and b"event-stream" not in headers.get(b"content-type", b""):
                        text = "this response was not streamed: leave starting_after out"
                        raise HttpError(400, text, error_code=HttpError.code)
                    has_begun = True
                    await send(self._start)
                if has_begun and (at < len(self.body) or self.is_over):
                    piece, at, is_last = bytes(self.body[at:]), len(self.body), self.is_over
                    piece = events.feed(piece)
                    if piece or is_last:
                        await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
                    if is_last:
                        return True
                    continue
                waiting = asyncio.ensure_future(news.wait())
                try:
                    await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waiting.cancel()
            return False
        finally:
            gone.cancel()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
