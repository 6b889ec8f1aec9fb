"""The client that `shared.bus` stands on, in a world: as much of nats-py as is used."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any
from urllib.parse import ParseResult, urlparse

import nats.errors
from nats.aio.client import Srv
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import StorageType, StreamConfig
from nats.nuid import NUID

from shared.errors import BusUnavailable
from tests.simulation.bus import MOST_PAYLOAD_BYTES, Bus, Interest, Server, Settle
from tests.simulation.threads import strand
from tests.simulation.wires import Connection
from tests.simulation.world import Process

Hook = Callable[[], Awaitable[None]]


class VirtualClient:
    """As much of `nats.aio.client.Client` as `shared.bus` uses. Reconnects by itself, for ever."""

    max_payload = MOST_PAYLOAD_BYTES

    def __init__(self) -> None:
        self._process = strand().process
        self._bus: Bus = self._process.world.bus
        self._nuid = NUID()
        self._subs: dict[int, Subscription] = {}
        self._sids = count(1)
        self._unsent: list[tuple[str, bytes, str, dict[str, str] | None]] = []
        self._unsent_bytes, self._pending_limit = 0, 0
        self.is_closed, self.is_draining = False, False
        self.is_reconnecting, self._transport = False, None
        self._current_server: Srv | None = None
        self.options: dict[str, Any] = {}
        self._server_pool: list[Srv] = []
        self.reached = 0
        self.on_reach: Callable[[int], None] | None = None

    @property
    def is_connected(self) -> bool:
        return self._wire.is_open

    @property
    def connected_url(self) -> ParseResult | None:
        return self._current_server.uri if self._current_server and self.is_connected else None

    @property
    def _server_info(self) -> dict[str, str]:
        return {"server_name": self._wire.server.name}

    async def connect(self, urls: list[str], **options: Any) -> None:
        self._error_cb = options["error_cb"]
        self._disconnected_cb: Hook = options["disconnected_cb"]
        self._reconnected_cb: Hook = options["reconnected_cb"]
        self._closed_cb: Hook = options["closed_cb"]
        self.options["name"] = options["name"]
        self._pending_limit = options["pending_size"]
        self._choose = options["reconnect_to_server_handler"]
        self._most_s: float = options["connect_timeout"]
        self._server_pool = [Srv(urlparse(url)) for url in urls]
        self._wire = Connection(self._bus, self._process, options["name"], options["user"] or "")
        self._wire.take = self._take
        self._wire.on_broken = self._on_broken
        self._wire.on_reach = self._on_reach
        at = count()
        while not await self._dial(self._server_pool[next(at) % len(urls)]):
            await asyncio.sleep(0.05)

    async def _dial(self, chosen: Srv) -> bool:
        """Whether that server took the connection."""
        self._current_server, server = chosen, self._bus.at(chosen.uri.geturl())
        takes_s = self._wire.reach_s(server) if server.is_up else 0.0
        await asyncio.sleep(min(takes_s, self._most_s))
        if takes_s > self._most_s or not server.works or self.is_closed:
            chosen.reconnects += 1
            return False
        chosen.reconnects = 0
        self._wire.name = self.options["name"]
        self._wire.open(server)
        return True

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
        wire = self._wire
        data = self._bus.rewrite(wire.user, payload)
        server = wire.server
        wire.up(lambda: server.route(subject, data, reply, headers, wire), is_kept=True)

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
            server = self._wire.server
            interest = Interest(server, self._wire, sub._id, sub._subject, sub._queue)
            self._wire.up(lambda: server.add(interest))

    async def flush(self, timeout: float = 10.0) -> None:
        """There and back."""

        def there(server: Server, settle: Settle) -> None:
            settle(None, None)

        asking = asyncio.ensure_future(self.round_trip(there))
        breaks = self._wire.breaks
        async with asyncio.timeout(timeout):
            while not asking.done():  # As nats-py: of a connection that broke, the next one's answer counts.
                if self._wire.is_open and self._wire.breaks != breaks:
                    asking.cancel()
                    breaks, asking = self._wire.breaks, asyncio.ensure_future(self.round_trip(there))
                await asyncio.wait({asking}, timeout=0.1)
            await asking

    async def _flush_pending(self, force_flush: bool = False) -> None:
        await asyncio.sleep(0)

    async def round_trip(self, ask: Callable[[Server, Settle], object]) -> Any:
        """Return the result that `ask` settles at the server. It never comes if the connection breaks."""
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

        wire, breaks = self._wire, self._wire.breaks
        server = wire.server

        def tell(result: Any, error: Exception | None) -> None:
            if wire.breaks == breaks:
                wire.down(lambda: settle(result, error))

        if wire.is_open:
            wire.up(lambda: ask(server, tell), is_kept=True)
        return await answer

    async def request(self, subject: str, payload: bytes, timeout: float) -> None:
        """The one that leases make without a reply's content: the bucket's leader steps down."""
        name, to = subject.rpartition(".KV_")[2], json.loads(payload)["placement"]["preferred"]
        await self.jetstream(timeout).call(name, lambda server: server.step_down(name, to))

    async def drain(self) -> None:
        """Close once what the server has sent is handled."""
        for sid in self._subs:
            await self._send_unsubscribe(sid)
        with contextlib.suppress(TimeoutError):
            await self.flush(self.options["drain_timeout"])
        await self.close()

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
            self._wire.up(lambda: self._wire.server.remove(self._wire, sid))

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

    def _on_reach(self, reached: int) -> None:
        before, self.reached = self.reached, reached
        if reached != before and self.on_reach is not None:
            self.on_reach(before)

    def _on_broken(self, away_s: float) -> None:
        if not self.is_closed:
            self.is_reconnecting = True
            self._own(self._reconnect(away_s))

    async def _reconnect(self, away_s: float) -> None:
        await self._disconnected_cb()
        await asyncio.sleep(away_s)
        while True:
            chosen, delay_s = self._choose(self._server_pool, self._server_info)
            await asyncio.sleep(delay_s)
            if self.is_closed:
                return
            if await self._dial(chosen):
                break
        self.is_reconnecting = False
        for sub in self._subs.values():
            self._ask_for(sub)
        unsent, self._unsent, self._unsent_bytes = self._unsent, [], 0
        for message in unsent:
            self._send(*message)
        await self._reconnected_cb()

    def _own(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        self._process.loop.create_task(run())


async def server_info(url: str, _: Any) -> dict[str, list[str]]:
    """In place of `shared.server_info`."""
    process = strand().process
    bus: Bus = process.world.bus
    server = bus.at(url)
    until_s = max(server.hangs_until_s, bus.apart_until_s(process.name, server.name))
    await asyncio.sleep(max(0.0, until_s - process.world.now_s) + 2 * bus.delay_s())
    if not server.is_up:
        raise ConnectionRefusedError
    return {"connect_urls": server.told}


@dataclass(frozen=True)
class _Entry:
    value: bytes
    revision: int


class _JetStream:
    """As much of it as leases use."""

    def __init__(self, client: VirtualClient, timeout_s: float) -> None:
        self._client, self._timeout_s = client, timeout_s

    async def key_value(self, bucket: str) -> "_KeyValue":
        await self.call(bucket, lambda server: server.bucket(bucket))
        return _KeyValue(self, bucket)

    async def stream_info(self, stream: str, subjects_filter: str) -> Any:
        name = stream.removeprefix("KV_")
        return await self.call(name, lambda server: server.info(name, subjects_filter))

    async def add_stream(self, config: StreamConfig) -> None:
        """A bucket, unless another process was faster."""
        name, first = str(config.name).removeprefix("KV_"), config.first_seq or 1
        in_files = config.storage is StorageType.FILE
        await self.call(name, lambda server: server.make_bucket(name, first, in_files))

    async def call(self, name: str, ask: Callable[[Server], Any], is_write: bool = False) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._client.round_trip(
                    lambda server, settle: server.consult(name, ask, settle, is_write)
                )
        except TimeoutError:
            raise nats.errors.TimeoutError from None


class _KeyValue:
    def __init__(self, context: _JetStream, bucket: str) -> None:
        self._context, self._bucket = context, bucket

    async def get(self, key: str) -> _Entry:
        name = self._bucket
        return _Entry(*await self._context.call(name, lambda server: server.get(name, key)))

    async def update(self, key: str, value: bytes, last: int) -> int:
        name = self._bucket
        written = self._context.call(name, lambda server: server.put(name, key, value, last), is_write=True)
        revision: int = await written
        return revision


class ExpressSocket:
    """The socket below `shared.bus.express.Express`: the server's side of its few verbs."""

    def __init__(self, process: Process, user: str, url: str) -> None:
        """Raises BusUnavailable."""
        bus: Bus = process.world.bus
        self._wire = Connection(bus, process, user, user)
        self._is_broken = False
        self._wire.on_broken = self._break
        if (
            not (server := bus.at(url)).works
            or bus.apart_until_s(process.name, server.name) > process.world.now_s
        ):
            raise BusUnavailable(f"no express connection to {url}")
        self._wire.open(server)

    def _break(self, _: float) -> None:
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
            payload = wire.bus.rewrite(wire.user, data[at : at + size])
            at += size + 2
            wire.up(partial(server.route, subject, payload, sender=wire), is_kept=True)
        return len(data)

    def recv(self, _: int) -> bytes:
        if self._is_broken or not self._wire.is_open:
            return b""
        raise BlockingIOError

    def close(self) -> None:
        self._wire.close()
