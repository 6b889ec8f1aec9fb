"""nats-py's client, with less work for each message: they are handled in the transport's callback, not in a
task."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.protocol.parser import AWAITING_CONTROL_LINE

TURN_S = 0.004
"""Maximum time to process messages in a row before yielding to the event loop. nats-py reads as long as its
socket has data. After a stall of one second, that blocked a gateway's new requests for 0.17 s."""
_END = b"\r\n"


class FairClient(Client):
    """NATS client that yields to the event loop while it reads."""

    reached = 0
    """Number of addresses that the server told last: its own, and those of servers that it reaches."""
    on_reach: Callable[[int], None] | None = None
    """Called with the former `reached` when it changes."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        await super()._process_info(info, initial_connection)
        before, self.reached = self.reached, len(info.get("connect_urls") or ())
        if self.reached != before and self.on_reach is not None:
            self.on_reach(before)

    async def _process_op_err(self, e: Exception) -> None:
        """Abort the lost connection: asyncio waits 30 s for a server that hangs to end its encryption."""
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None and self.is_connected:
            writer.transport.abort()
        await super()._process_op_err(e)

    async def _read_loop(self) -> None:
        transport: Any = self._transport
        writer = getattr(transport, "_io_writer", None)
        if writer is None or transport.at_eof():  # a WebSocket, or a connection that is lost already
            return await super()._read_loop()
        reader = _Reader(self, writer.transport, transport._io_reader)
        try:
            error = await reader.over
            if isinstance(error, nats.errors.UnexpectedEOF):
                await self._error_cb(error)
            await self._process_op_err(error)
        except asyncio.CancelledError:
            pass
        finally:
            reader.end(nats.errors.UnexpectedEOF())


class EncryptedClient(FairClient):
    """NATS client that never sends its password unencrypted; nats-py does if the server offers no TLS."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and not info.get("tls_required"):
            raise nats.errors.Error("nats: the server offers no TLS")
        await super()._process_info(info, initial_connection)


class _Reader(asyncio.Protocol):
    """Reads a connection in place of its stream. Plain messages are delivered at once. Anything else, which
    is rare, goes through nats-py's parser in a task."""

    def __init__(self, client: Client, transport: Any, stream: asyncio.StreamReader) -> None:
        self._client, self._transport = client, transport
        self._loop = asyncio.get_running_loop()
        self._former = transport.get_protocol()
        self.pause_writing = self._former.pause_writing  # type: ignore[method-assign]  # for `drain`
        self.resume_writing = self._former.resume_writing  # type: ignore[method-assign]
        self.over: asyncio.Future[Exception] = self._loop.create_future()
        self._data = bytes(stream._buffer)  # type: ignore[attr-defined]
        self._parsing: asyncio.Task[None] | None = None
        self._is_held = False
        """`_data` waits for the other callbacks of the event loop, or for the parser."""
        stream._buffer.clear()  # type: ignore[attr-defined]
        transport.set_protocol(self)
        self._go_on()

    def data_received(self, data: bytes) -> None:
        self._data = self._data + data if self._data else data
        if not self._is_held:
            self._read()

    def eof_received(self) -> bool | None:
        self.end(nats.errors.UnexpectedEOF())
        stays_open = bool(self._former.eof_received())
        return stays_open and self._transport.get_extra_info("sslcontext") is None

    def connection_lost(self, error: Exception | None) -> None:
        self.end(error if isinstance(error, OSError) else nats.errors.UnexpectedEOF())
        self._former.connection_lost(error)

    def end(self, error: Exception) -> None:
        """Read no more."""
        self._is_held, self._data = True, b""
        if self._parsing is not None:
            self._parsing.cancel()
        if not self.over.done():
            self.over.set_result(error)

    def _go_on(self) -> None:
        if not self.over.done():
            self._is_held = False
            if self._data:
                self._read()
            if not (self._is_held or self._transport.is_closing()):
                self._transport.resume_reading()

    def _read(self) -> None:
        """Deliver the messages of `_data`, for up to `TURN_S`; leave the rest to a later call."""
        client, data, at = self._client, self._data, 0
        until_s = time.perf_counter() + TURN_S
        if client._ps.state != AWAITING_CONTROL_LINE:
            return self._parse(data)
        while (end := data.find(_END, at)) >= 0:
            words = data[at:end].split()
            if words[:1] != [b"MSG"]:
                return self._parse(data[at:])
            start, size = end + 2, int(words[-1])
            if len(data) < start + size + 2:
                break
            subscription = client._subs.get(int(words[2]))
            if subscription is not None:
                queue, most_bytes = subscription._pending_queue, subscription._pending_bytes_limit
                subscription._pending_size += size
                is_full = queue.full() or 0 < most_bytes <= subscription._pending_size
                if is_full or subscription._future or subscription._jsi or subscription._max_msgs:
                    subscription._pending_size -= size
                    return self._parse(data[at:])
                subscription._received += 1
                reply = words[3].decode() if len(words) == 5 else ""
                message = Msg(
                    client, words[1].decode(), reply, data[start : start + size], _sid=subscription._id
                )
                queue.put_nowait(message)
            at = start + size + 2
            if time.perf_counter() > until_s and at < len(data):
                self._is_held = True
                if not self._transport.is_closing():
                    self._transport.pause_reading()
                self._loop.call_soon(self._go_on)
                break
        self._data = data[at:]

    def _parse(self, data: bytes) -> None:
        self._is_held, self._data = True, data
        self._parsing = self._loop.create_task(self._parsed())

    async def _parsed(self) -> None:
        """Let nats-py's parser have all of `_data`; take back what it leaves between two messages."""
        parser = self._client._ps
        data, self._data = self._data, b""
        try:
            await parser.parse(data)
        except (nats.errors.ProtocolError, OSError) as error:
            return self.end(error)
        if parser.state == AWAITING_CONTROL_LINE:
            self._data = bytes(parser.buf) + self._data
            parser.buf.clear()
        self._go_on()
