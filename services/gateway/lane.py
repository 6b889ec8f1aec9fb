"""The short way from an event to a client's socket: past ASGI's awaitables, which wait for nothing here.

Only for the pieces of a body that goes out in chunks and is under way; beginning and end are ASGI's. Knows
uvicorn's cycle of request and response, nothing of what is written.
"""

from typing import Final

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

LANE: Final = "kvasir.lane"
"""Where an application finds the `Lane` in the ASGI scope, if there is one."""


class Lane:
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
