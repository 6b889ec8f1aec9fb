"""Publish-only connection for one thread, without an event loop between it and the server.

Sending through the event loop costs a compute thread a wake-up per message. On a busy core it also waits for
the interpreter lock. This client speaks only CONNECT, PUB, PING and PONG, without TLS, and never blocks. A
message that it refuses must be sent over the bus.
"""

import json
import logging
import re
import socket
from asyncio import Future
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

import msgspec

from shared.bus.counters import BusCounters
from shared.config import BusConfig
from shared.errors import BusUnavailable
from shared.messages.base import encode

_log = logging.getLogger("kvasir.bus")
_REFUSED = re.compile(rb'permissions violation for publish to "([^"]+)"', re.IGNORECASE)
_READ_BYTES = 65_536
_DEFAULT_PORT = 4222


class Express:
    """One connection. `connect` may run anywhere; all other calls belong to one thread. `close` may also
    follow that thread's end."""

    def __init__(
        self, connection: socket.socket, config: BusConfig, limit_bytes: int, counters: BusCounters
    ) -> None:
        connection.setblocking(False)
        self._counters = counters
        self._socket = connection
        self._buffer_bytes = config.outbound_buffer_bytes
        self._limit_bytes = limit_bytes
        self._unsent = b""
        self._unread = b""
        self._refused: set[str] = set()
        self._is_up = True

    @classmethod
    def connect(cls, config: BusConfig, name: str, counters: BusCounters) -> "Express":
        """Connect, blocking up to `config.connect_timeout_s`. Raise BusUnavailable, also if the bus is
        encrypted."""
        address = urlsplit(config.url)
        if address.scheme != "nats" or config.tls_ca is not None:
            raise BusUnavailable("an express connection is not encrypted, and the bus is")
        place = (address.hostname or "127.0.0.1", address.port or _DEFAULT_PORT)
        try:
            connection = socket.create_connection(place, config.connect_timeout_s)
        except OSError as error:
            raise BusUnavailable(f"no express connection to {config.url}: {error}") from None
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return cls(connection, config, _introduce(connection, config, name), counters)
        except BaseException:
            connection.close()
            raise

    @property
    def is_up(self) -> bool:
        """False for good once the connection is lost; open another."""
        return self._is_up

    def publish(self, messages: Sequence[tuple[str, msgspec.Struct]]) -> bool:
        """Send all messages in order and return True, or send none and return False."""
        if not self._is_up:
            return False
        pieces: list[bytes] = []
        for subject, message in messages:
            data = encode(message)
            if len(data) > self._limit_bytes or subject.lower() in self._refused:
                return False
            pieces.append(b"PUB %b %d\r\n%b\r\n" % (subject.encode(), len(data), data))
        if not self._send(b"".join(pieces)):
            return False
        for _, message in messages:
            self._counters.sent(type(message)).inc()
        return True

    def attend(self) -> None:
        """Answer the server's pings and detect a lost connection. Call it a few times a second."""
        while self._is_up:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                return self._give_up(str(error))
            if not data:
                return self._give_up("the server closed it")
            *lines, self._unread = (self._unread + data).split(b"\r\n")
            for line in lines:
                self._take(line)
        self._send(b"")

    def close(self) -> None:
        self._is_up = False
        self._socket.close()

    def _take(self, line: bytes) -> None:
        if line == b"PING":
            self._send(b"PONG\r\n")
        elif refused := _REFUSED.search(line):
            self._refused.add(refused[1].decode().lower())
        elif line.startswith(b"-ERR"):
            self._give_up(line.decode("utf-8", "replace"))

    def _send(self, data: bytes) -> bool:
        """Send what the socket accepts; keep the rest for the next call, up to a bound."""
        if not self._is_up:
            return False
        data = self._unsent + data if self._unsent else data
        try:
            sent = self._socket.send(data) if data else 0
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._give_up(str(error))
            return False
        self._unsent = data[sent:]
        if len(self._unsent) > self._buffer_bytes:
            self._give_up("the server does not read")
            return False
        return True

    def _give_up(self, why: str) -> None:
        if self._is_up:
            _log.warning("the express connection is over: %s", why)
            self.close()


def close_unwanted(opening: "Future[Express]") -> None:
    """Close the connection of a future that nobody awaits any more."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _introduce(connection: socket.socket, config: BusConfig, name: str) -> int:
    """Run the handshake (INFO, CONNECT, PING, PONG). Return the maximum message size in bytes."""
    lines = connection.makefile("rb")
    try:
        greeting = lines.readline()
        info = json.loads(greeting.removeprefix(b"INFO "))
        if info.get("tls_required"):
            raise BusUnavailable("an express connection is not encrypted, and the server wants it")
        connection.sendall(b"CONNECT %b\r\nPING\r\n" % json.dumps(_credentials(config, name)).encode())
        answer = lines.readline()
        while answer.startswith((b"INFO", b"+OK")):
            answer = lines.readline()
    except (OSError, ValueError) as error:
        raise BusUnavailable(f"no express connection to {config.url}: {error}") from None
    finally:
        lines.close()
    if answer.strip() != b"PONG":
        raise BusUnavailable(f"no express connection to {config.url}: {answer.decode('utf-8', 'replace')!r}")
    return min(config.max_payload_bytes, int(info["max_payload"]))


def _credentials(config: BusConfig, name: str) -> dict[str, object]:
    address = urlsplit(config.url)
    user = config.user or (unquote(address.username) if address.username else None)
    password = config.password.get_secret_value() if config.password else None
    if password is None and address.password:
        password = unquote(address.password)
    told = {"user": user, "pass": password} if user else {}
    return {"verbose": False, "pedantic": False, "lang": "python", "version": "1", "name": name, **told}
