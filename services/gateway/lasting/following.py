"""Connections that read a lasting answer."""

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from services.gateway.errors import ClientGone
from services.gateway.http.middleware import RequestRecord
from services.gateway.lasting.desk import Kept, LastingDesk


class Following(Response):
    """Response that reads one lasting answer."""

    def __init__(self, desk: LastingDesk, kept: Kept, record: RequestRecord, after: int = -1) -> None:
        """Events up to the number `after` are skipped."""
        super().__init__()
        self._desk = desk
        self._kept = kept
        self._record = record
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if self._record.method == "POST":  # a repeated request reads what the first one ignored
                self._record.ignored = self._kept.ignored
            await send(message)

        is_complete = False
        self._kept.readers += 1
        try:
            is_complete = await self._kept.transcript.read(send_on, _gone(receive), self._after)
            self._record.is_gone = not is_complete
        except ClientGone:
            self._record.is_gone = True
        finally:
            self._desk.leave(self._kept, is_complete=is_complete)


async def _gone(receive: Receive) -> None:
    """Wait for the client to disconnect."""
    while (await receive())["type"] != "http.disconnect":
        pass
