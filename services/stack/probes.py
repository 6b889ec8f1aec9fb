"""Readiness probes of children. A probe returns what is still missing, or None. They use bare sockets,
because they run while everything else starts on the same cores."""

import asyncio
import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_DEADLINE_S = 2.0
_MAX_ANSWER_BYTES = 65_536


class Probe(Protocol):
    """A single readiness check."""

    async def obstacle(self, age_s: float) -> str | None:
        """Return why a child of this age is not ready, in a few words, or None if it is."""
        ...


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
