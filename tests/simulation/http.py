"""HTTP between clients and gateways of a world: the gateway's application, called without a socket.

A response arrives in order, a while after it was sent. It breaks off when the gateway dies, and never comes
further while the gateway is cut off.
"""

import asyncio
import contextvars
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.types import ASGIApp, Message

from services.gateway.http.connection import DIRECT_WRITER
from tests.simulation.threads import strand
from tests.simulation.world import A_MOMENT_S, Process

_DELAYS_S = (0.0002, 0.0005, 0.001)


class VirtualListener:
    """In place of a listening socket."""

    def __init__(self, host: str, port: int, setting: str, *, is_shared: bool = False) -> None:
        self.is_operators = setting == "operator_port"

    def close(self) -> None:
        pass


apps: dict[Process, "VirtualServer"] = {}
"""By gateway, those that listen for clients."""


class VirtualServer:
    """In place of uvicorn's."""

    def __init__(self, app: ASGIApp, config: Any) -> None:
        self.app = app
        self.should_exit = False
        self.open: set[asyncio.Task[None]] = set()

    async def serve(self, sockets: list[VirtualListener]) -> None:
        """Until it is told to end, and what is open has ended."""
        if not sockets[0].is_operators:
            apps[strand().process] = self
        while not self.should_exit or self.open:
            await asyncio.sleep(0.05)


class Refused(Exception):
    """Nobody listens there."""


class Broken(Exception):
    """The connection broke off."""


class Exchange:
    """One request of a client, which reads what comes."""

    def __init__(self, gateway: Process, client: Process) -> None:
        self._gateway, self._client = gateway, client
        self._world = client.world
        self._arrived: asyncio.Queue[Message | None] = asyncio.Queue()
        self._last_s, self._is_gone = 0.0, False
        self._leave: Callable[[], None] = lambda: None
        self.status = 0

    def begin(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        """Raises Refused."""
        server = apps.get(self._gateway)
        if server is None or not self._gateway.alive or server.should_exit:
            raise Refused
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self._gateway.on_death.append(lambda: self._to_client(None))
        self._to_gateway(lambda: self._serve(server, scope, body))

    async def pieces(self) -> AsyncIterator[bytes]:
        """Of the body. Raises Broken."""
        while True:
            message = await self._arrived.get()
            if message is None:
                raise Broken
            if message["type"] == "http.response.start":
                self.status = message["status"]
                continue
            yield message.get("body", b"")
            if not message.get("more_body", False):
                return

    def leave(self) -> None:
        """The client closes the connection."""
        self._is_gone = True

        def at_gateway() -> None:
            self._leave()

        self._to_gateway(at_gateway)

    # --- at the gateway

    def _serve(self, server: VirtualServer, scope: dict[str, Any], body: bytes) -> None:
        gone = asyncio.Event()
        self._leave = gone.set
        parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if parts:
                return parts.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if gone.is_set():
                raise OSError("the client has gone")
            self._to_client(dict(message))

        writer = _Writer(self._to_client, gone)
        scope[DIRECT_WRITER] = writer

        async def run() -> None:
            try:
                await server.app(scope, receive, send)
            finally:
                gone.set()

        loop = self._gateway.loop
        task = loop.create_task(run(), context=contextvars.copy_context())
        server.open.add(task)
        task.add_done_callback(server.open.discard)

    # --- the wire

    def _to_gateway(self, act: Callable[[], object]) -> None:
        gateway = self._gateway

        def arrive() -> None:
            if gateway.alive:
                gateway.loop.call_from_outside(act)

        self._world.after(self._delay_s(), arrive)

    def _to_client(self, message: Message | None) -> None:
        if self._is_gone:
            return
        self._last_s = max(self._last_s + A_MOMENT_S, self._world.now_s + self._delay_s())
        arrived = self._arrived
        self._world.at(self._last_s, lambda: self._client.loop.call_from_outside(arrived.put_nowait, message))

    def _delay_s(self) -> float:
        return self._world.random.choice(_DELAYS_S)


class _Writer:
    """As `DirectWriter`."""

    def __init__(self, to_client: Callable[[Message], None], gone: asyncio.Event) -> None:
        self._to_client, self._gone = to_client, gone

    @property
    def is_open(self) -> bool:
        return not self._gone.is_set()

    def write(self, piece: bytes) -> None:
        self._to_client({"type": "http.response.body", "body": piece, "more_body": True})


def events_in(piece: bytes) -> list[Any]:
    """Of a stream of them, in whole pieces; `[DONE]` is None."""
    found: list[Any] = []
    for line in piece.decode().split("\n"):
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            found.append(None if data == "[DONE]" else json.loads(data))
    return found
