"""The client that `shared.bus` stands on, in a world: as much of nats-py as is used."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import StreamConfig
from nats.nuid import NUID

from tests.simulation.bus import MOST_PAYLOAD_BYTES, Bucket, Connection, Interest, Server
from tests.simulation.threads import strand
from tests.simulation.world import Process

Hook = Callable[[], Awaitable[None]]


class VirtualClient:
    """As much of `nats.aio.client.Client` as `shared.bus` uses. Reconnects by itself, for ever."""

    max_payload = MOST_PAYLOAD_BYTES

    def __init__(self) -> None:
        self._process = strand().process
        self._server: Server = self._process.world.server
        self._nuid = NUID()
        self._subs: dict[int, Subscription] = {}
        self._sids = count(1)
        self._unsent: list[tuple[str, bytes, str, dict[str, str] | None]] = []
        self._unsent_bytes, self._pending_limit = 0, 0
        self.is_closed, self.is_draining = False, False
        self.is_reconnecting, self._transport = False, None

    @property
    def is_connected(self) -> bool:
        return self._wire.is_open

    async def connect(self, url: str, **options: Any) -> None:
        self._error_cb = options["error_cb"]
        self._disconnected_cb: Hook = options["disconnected_cb"]
        self._reconnected_cb: Hook = options["reconnected_cb"]
        self._closed_cb: Hook = options["closed_cb"]
        self._pending_limit = options["pending_size"]
        self._wire = Connection(self._server, self._process, options["name"], options["user"] or "")
        self._wire.take = self._take
        self._wire.on_broken = self._on_broken
        self._wire.on_back = self._on_back
        while not self._server.is_up:
            await asyncio.sleep(0.05)
        await asyncio.sleep(self._server.delay_s())
        self._wire.open()

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        if self._wire.is_open:
            self._send(subject, payload, reply, headers)
            return
        self._unsent_bytes += len(payload)
        if self._unsent_bytes > self._pending_limit:
            self._unsent_bytes -= len(payload)
            raise nats.errors.OutboundBufferLimitError
        self._unsent.append((subject, payload, reply, headers))

    def _send(self, subject: str, payload: bytes, reply: str, headers: dict[str, str] | None) -> None:
        server, wire = self._server, self._wire
        data = server.rewrite(wire.user, payload)
        wire.up(lambda: server.route(subject, data, reply, headers, wire))

    async def subscribe(
        self, subject: str, queue: str = "", cb: Callable[[Msg], Awaitable[None]] | None = None, **_: Any
    ) -> Subscription:
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        sid = next(self._sids)
        sub = Subscription(self, sid, subject, queue, cb)
        sub._start(self._error_cb)  # type: ignore[no-untyped-call]
        self._subs[sid] = sub
        self._ask_for(sub)
        return sub

    def _ask_for(self, sub: Subscription) -> None:
        if self._wire.is_open:
            interest = Interest(self._wire, sub._id, sub._subject, sub._queue)
            self._wire.up(lambda: self._server.add(interest))

    async def flush(self, timeout: float = 10.0) -> None:
        """There and back."""
        asking = asyncio.ensure_future(self.round_trip(lambda: None))
        breaks = self._wire.breaks
        async with asyncio.timeout(timeout):
            while not asking.done():  # As nats-py: of a connection that broke, the next one's answer counts.
                if self._wire.is_open and self._wire.breaks != breaks:
                    asking.cancel()
                    breaks, asking = self._wire.breaks, asyncio.ensure_future(self.round_trip(lambda: None))
                await asyncio.wait({asking}, timeout=0.1)
            await asking

    async def _flush_pending(self, force_flush: bool = False) -> None:
        await asyncio.sleep(0)

    async def round_trip(self, ask: Callable[[], Any]) -> Any:
        """What `ask` says at the server; never, if the connection does not last so long."""
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        answer = asyncio.get_running_loop().create_future()

        def settle(result: Any, error: Exception | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)

        def at_server() -> None:
            try:
                result = ask()
            except Exception as error:
                failure = error
                self._wire.down(lambda: settle(None, failure))
            else:
                self._wire.down(lambda: settle(result, None))

        if self._wire.is_open:
            self._wire.up(at_server)
        return await answer

    async def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        for sub in self._subs.values():
            sub._stop_processing()
        if hasattr(self, "_wire"):
            self._wire.close()
            await self._closed_cb()

    async def _send_unsubscribe(self, sid: int, limit: int = 0) -> None:
        if self._wire.is_open:
            self._wire.up(lambda: self._server.remove(self._wire, sid))

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._subs.pop(sid, None)

    def jetstream(self, timeout: float) -> "_JetStream":
        return _JetStream(self, timeout)

    def _take(self, sid: int, subject: str, data: bytes, reply: str, headers: dict[str, str] | None) -> None:
        sub = self._subs.get(sid)
        if sub is None or sub._closed:
            return
        sub._received += 1
        sub._pending_size += len(data)
        sub._pending_queue.put_nowait(
            Msg(_client=self, subject=subject, reply=reply, data=data, headers=headers, _sid=sid)  # type: ignore[arg-type]
        )

    def _on_broken(self) -> None:
        if not self.is_closed:
            self.is_reconnecting = True
            self._own(self._disconnected_cb())

    def _on_back(self) -> None:
        if self.is_closed or self._wire.is_open:
            return
        self._wire.open()
        self.is_reconnecting = False
        for sub in self._subs.values():
            self._ask_for(sub)
        unsent, self._unsent, self._unsent_bytes = self._unsent, [], 0
        for message in unsent:
            self._send(*message)
        self._own(self._reconnected_cb())

    def _own(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        self._process.loop.create_task(run())


@dataclass(frozen=True)
class _Entry:
    value: bytes
    revision: int


class _JetStream:
    """As much of it as leases use."""

    def __init__(self, client: VirtualClient, timeout_s: float) -> None:
        self._client, self._timeout_s = client, timeout_s

    async def key_value(self, bucket: str) -> "_KeyValue":
        server = self._client._server
        await self.call(lambda: server.bucket(bucket))
        return _KeyValue(self, server, bucket)

    async def add_stream(self, config: StreamConfig) -> None:
        """A bucket, unless another process was faster."""
        server, name = self._client._server, str(config.name).removeprefix("KV_")
        await self.call(lambda: server.buckets.setdefault(name, Bucket(count(config.first_seq or 1))))

    async def call(self, ask: Callable[[], Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._client.round_trip(ask)
        except TimeoutError:
            raise nats.errors.TimeoutError from None


class _KeyValue:
    def __init__(self, context: _JetStream, server: Server, bucket: str) -> None:
        self._context, self._server, self._bucket = context, server, bucket

    async def get(self, key: str) -> _Entry:
        def read() -> _Entry:
            found = self._server.bucket(self._bucket).values.get(key)
            if found is None:
                raise nats.js.errors.KeyNotFoundError
            return _Entry(*found)

        entry: _Entry = await self._context.call(read)
        return entry

    async def update(self, key: str, value: bytes, last: int) -> int:
        revision: int = await self._context.call(lambda: self._server.put(self._bucket, key, value, last))
        return revision


class ExpressSocket:
    """The socket below `shared.bus.express.Express`: the server's side of its few verbs."""

    def __init__(self, process: Process, user: str) -> None:
        self._wire = Connection(process.world.server, process, user, user)
        self._is_broken = False
        self._wire.on_broken = self._break
        self._wire.on_back = lambda: None
        self._wire.open()

    def _break(self) -> None:
        self._is_broken = True

    def setblocking(self, _: bool) -> None:
        pass

    def send(self, data: bytes) -> int:
        if self._is_broken or not self._wire.is_open:
            raise ConnectionResetError("the connection was reset")
        server, wire = self._wire.server, self._wire
        at = 0
        while at < len(data):
            end = data.index(b"\r\n", at)
            verb, *words = data[at:end].split(b" ")
            at = end + 2
            if verb != b"PUB":
                continue
            subject, size = words[0].decode(), int(words[-1])
            payload = server.rewrite(wire.user, data[at : at + size])
            at += size + 2
            wire.up(partial(server.route, subject, payload, sender=wire))
        return len(data)

    def recv(self, _: int) -> bytes:
        if self._is_broken or not self._wire.is_open:
            return b""
        raise BlockingIOError

    def close(self) -> None:
        self._wire.close()
