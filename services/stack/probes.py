"""Probes of children. A readiness probe returns what is still missing, or None. They use bare sockets,
because they run while everything else starts on the same cores, and when the bus hangs."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from shared.config import BusConfig

_GREETING = b"INFO {"
_DEADLINE_S = 2.0
_MAX_ANSWER_BYTES = 65_536


class Probe(Protocol):
    """A single readiness check."""

    async def obstacle(self, age_s: float) -> str | None:
        """Return why a child of this age is not ready, in a few words, or None if it is."""
        ...


Life = Callable[[int], Awaitable[dict[str, Any]]]
"""Returns the account (`shared.watchdog`; empty if it has none) of the process with that pid, if it works.
Raises OSError or ValueError; the caller sets a deadline."""


async def greeting(config: BusConfig, _: int = 0) -> dict[str, Any]:
    """Wait for the greeting that nats-server sends before authentication. Return the addresses of its
    cluster, if it tells any."""
    from shared.bus.link import tls_options  # slow to import

    address = urlsplit(config.url)
    encrypted = tls_options(config).get("tls") if config.tls_handshake_first else None
    reader, writer = await asyncio.open_connection(address.hostname, address.port, ssl=encrypted)
    try:
        line = await reader.readline()
        if not line.startswith(_GREETING):
            raise ValueError(f"what listens at {config.url} is no nats-server")
        urls = json.loads(line.removeprefix(b"INFO ")).get("connect_urls", [])
        return {"connect_urls": urls} if urls else {}
    finally:
        writer.close()


async def seed_answers(path: Path, _: int) -> dict[str, Any]:
    """Wait until the seed closes the connection after an invalid request."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        writer.write(b"\n")
        await reader.read()
    finally:
        writer.close()
    return {}


@dataclass(frozen=True)
class AliveProbe:
    """Ready after a moment, for children that serve nothing."""

    moment_s: float = 0.2

    async def obstacle(self, age_s: float) -> str | None:
        return None if age_s >= self.moment_s else "only just started"


@dataclass(frozen=True)
class TcpProbe:
    """Ready when a loopback port accepts connections."""

    port: int

    async def obstacle(self, age_s: float) -> str | None:
        try:
            async with asyncio.timeout(_DEADLINE_S):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except (OSError, TimeoutError):
            return f"nothing listens on port {self.port} yet"
        writer.close()
        return None


@dataclass(frozen=True)
class ClusterProbe:
    """Ready when a nats-server reaches all `servers` of its cluster."""

    greets: Life
    servers: int

    async def obstacle(self, age_s: float) -> str | None:
        try:
            async with asyncio.timeout(_DEADLINE_S):
                reached = len((await self.greets(0)).get("connect_urls", ()))
        except (OSError, TimeoutError, ValueError):
            return "does not greet yet"
        if reached >= self.servers:
            return None
        others = f"reaches {max(0, reached - 1)} of the {self.servers - 1} other servers"
        return f"{others}: see in its log whether their routes' ports or certificates refuse it"


@dataclass(frozen=True)
class UnixProbe:
    """Ready when a Unix socket accepts connections."""

    path: Path

    async def obstacle(self, age_s: float) -> str | None:
        try:
            async with asyncio.timeout(_DEADLINE_S):
                _, writer = await asyncio.open_unix_connection(str(self.path))
        except (OSError, TimeoutError):
            return "imports"
        writer.close()
        return None


@dataclass(frozen=True)
class HttpProbe:
    """Ready when GET returns 200."""

    port: int
    path: str
    host: str = "127.0.0.1"

    async def obstacle(self, age_s: float) -> str | None:
        try:
            status, body = await http_get(self.port, self.path, host=self.host)
        except (OSError, TimeoutError, ValueError):
            return f"no answer on port {self.port} yet"
        return None if status == 200 else _reason(body) or f"{self.path} answers {status}"


def _reason(body: str) -> str:
    """Return the message of an OpenAI-style error body, else its first words."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return " ".join(body.split())[:100]


async def http_get(
    port: int, path: str, headers: tuple[str, ...] = (), *, host: str = "127.0.0.1"
) -> tuple[int, str]:
    """Return status and body of a local GET. Raise OSError, TimeoutError, or ValueError (not HTTP)."""
    async with asyncio.timeout(_DEADLINE_S):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            lines = (
                f"GET {path} HTTP/1.0",
                f"Host: {authority(host, port)}",
                "Connection: close",
                *headers,
                "",
                "",
            )
            writer.write("\r\n".join(lines).encode())
            answer = await _read_all(reader)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/"):
        raise ValueError(f"no HTTP answer on port {port}")
    return int(words[1]), body.decode("utf-8", "replace")


def authority(host: str, port: int) -> str:
    """Return host and port as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    parts = bytearray()
    while len(parts) < _MAX_ANSWER_BYTES and (part := await reader.read(_MAX_ANSWER_BYTES)):
        parts += part
    return bytes(parts)
