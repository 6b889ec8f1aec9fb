"""Probes of children. A readiness probe returns what is still missing, or None. They use bare sockets,
because they run while everything else starts on the same cores, and when the bus hangs."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from shared.config import BusConfig
from shared.server_info import server_info

_DEADLINE_S = 2.0
_MAX_ANSWER_BYTES = 65_536


Probe = Callable[[float], Awaitable[str | None]]
"""Returns why a child of this age is not ready, in a few words, or None if it is."""
Life = Callable[[int], Awaitable[dict[str, Any]]]
"""Returns the account (`shared.watchdog`; empty if it has none) of the process with that pid, if it works.
Raises OSError or ValueError; the caller sets a deadline."""


async def greeting(config: BusConfig, _: int = 0) -> dict[str, Any]:
    """Wait for the greeting that nats-server sends before authentication. Return the addresses of its
    cluster, if it tells any."""
    from shared.bus.link import tls_options  # slow to import

    encrypted = tls_options(config).get("tls") if config.tls_handshake_first else None
    urls = (await server_info(config.url, encrypted)).get("connect_urls")
    return {"connect_urls": urls} if urls else {}


async def seed_answers(path: Path, _: int) -> dict[str, Any]:
    """Wait until the seed closes the connection after an invalid request."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        writer.write(b"\n")
        await reader.read()
    finally:
        writer.close()
    return {}


async def lives(age_s: float, *, moment_s: float = 0.2) -> str | None:
    """Probe of a child that serves nothing: it is ready after a moment."""
    return None if age_s >= moment_s else "only just started"


async def listens(at: int | Path, _: float = 0.0) -> str | None:
    """Probe whether a loopback port or a Unix socket accepts connections."""
    try:
        async with asyncio.timeout(_DEADLINE_S):
            if isinstance(at, Path):
                opened = await asyncio.open_unix_connection(str(at))
            else:
                opened = await asyncio.open_connection("127.0.0.1", at)
    except (OSError, TimeoutError):
        return "imports" if isinstance(at, Path) else f"nothing listens on port {at} yet"
    opened[1].close()
    return None


async def reaches(greets: Life, servers: int, _: float = 0.0) -> str | None:
    """Probe whether a nats-server reaches all `servers` of its cluster."""
    try:
        async with asyncio.timeout(_DEADLINE_S):
            reached = len((await greets(0)).get("connect_urls", ()))
    except (OSError, TimeoutError, ValueError):
        return "does not greet yet"
    if reached >= servers:
        return None
    others = f"reaches {max(0, reached - 1)} of the {servers - 1} other servers"
    return f"{others}: see in its log whether their routes' ports or certificates refuse it"


async def serves(port: int, path: str, _: float = 0.0, *, host: str = "127.0.0.1") -> str | None:
    """Probe whether GET returns 200."""
    try:
        status, body = await http_get(port, path, host=host)
    except (OSError, TimeoutError, ValueError):
        return f"no answer on port {port} yet"
    return None if status == 200 else _reason(body) or f"{path} answers {status}"


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
    lines = (f"GET {path} HTTP/1.0", f"Host: {authority(host, port)}", "Connection: close", *headers)
    async with asyncio.timeout(_DEADLINE_S):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write("".join(f"{line}\r\n" for line in (*lines, "")).encode())
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
