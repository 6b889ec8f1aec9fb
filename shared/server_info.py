"""The greeting of a nats-server, which it sends before authentication."""

import asyncio
import json
import ssl
from typing import Any
from urllib.parse import urlsplit

_GREETING = b"INFO {"


async def server_info(url: str, encrypted: ssl.SSLContext | None) -> dict[str, Any]:
    """Return the greeting of the server at this address; `encrypted` if it encrypts from the first byte.
    Raise OSError, or ValueError if something else listens there. The caller sets a deadline."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, ssl=encrypted)
    try:
        line = await reader.readline()
        if not line.startswith(_GREETING):
            raise ValueError(f"what listens at {url} is no nats-server")
        return dict(json.loads(line.removeprefix(b"INFO ")))
    finally:
        writer.transport.abort()
