"""A stream of server-sent events: its headers once, and comments while there is nothing to say.

Knows nothing of what the events are.
"""

import asyncio
from typing import Final

from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from services.gateway.exchange import Exchange
from shared.errors import InternalError

DIRECT_WRITER: Final = "kvasir.direct_writer"
"""Where an application finds the `DirectWriter` in the ASGI scope, if there is one."""


class DirectWriter:
    """Of one response."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_open(self) -> bool:
        """Whether a chunk would go out now: the response has begun, its reader is there and keeps up."""
        cycle = self._cycle
        return not (
            cycle.disconnected
            or cycle.response_complete
            or not cycle.chunked_encoding
            or cycle.flow.write_paused
        )

    def write(self, piece: bytes) -> None:
        """One chunk, not empty (an empty one would end the body); the lane must be open."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: parsers skip it, proxies and clients see that the connection lives."""
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """Begins with the first thing written, or when nothing was for `keep_alive_s`."""

    def __init__(self, send: Send, keep_alive_s: float, lane: DirectWriter | None = None) -> None:
        self._send = send
        self._lane = lane
        self._is_writing = False
        self._keep_alive_s = keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._wrote_s = self._loop.time()
        self.has_begun = False
        """The headers are out: from here on an error can only be an event."""

    async def begin(self) -> None:
        """Send the headers, unless they are out."""
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})

    async def write(self, events: bytes, *, is_last: bool = False) -> None:
        """Send events, after the headers."""
        self._is_writing = True
        try:
            await self.begin()
            await self._send({"type": "http.response.body", "body": events, "more_body": not is_last})
        finally:
            self._is_writing = False
        self._wrote_s = self._loop.time()

    @property
    def can_push(self) -> bool:
        """Whether `push` may be called: the headers are out, and the client keeps up."""
        lane = self._lane
        return lane is not None and self.has_begun and not self._is_writing and lane.is_open

    def push(self, events: bytes) -> None:
        """Send events without waiting."""
        if self._lane is None:
            raise InternalError("there is no way to push events")
        self._lane.write(events)
        self._wrote_s = self._loop.time()

    async def wait(self, exchange: Exchange) -> None:
        """Until something changed; writes a comment whenever nothing was written for too long.

        Raises what `Exchange.wait` raises.
        """
        while True:
            try:
                async with asyncio.timeout_at(self._wrote_s + self._keep_alive_s):
                    return await exchange.wait()
            except TimeoutError:
                if self._loop.time() >= self._wrote_s + self._keep_alive_s:
                    await self.write(KEEP_ALIVE)
