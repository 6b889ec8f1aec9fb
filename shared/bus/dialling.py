"""Attempts to connect: giving one up, and when to make the next."""

import asyncio
import random
from typing import Any

from nats.aio.client import Client

BACKOFF_S = (0.05, 0.5)
"""First and longest mean wait between two attempts to reconnect."""


async def abandon(client: Client, connecting: asyncio.Task[None]) -> None:
    """End a connection attempt, however often nats-py swallows the cancellation."""
    while not connecting.done():
        connecting.cancel()
        await asyncio.wait({connecting}, timeout=0.1)
    await client.close()


def next_attempt(client: Client, servers: list[Any], _info: dict[str, Any]) -> tuple[Any, float]:
    """nats-py's choice of server: the first, after a jittered wait that doubles with its failures."""
    if client._transport is not None:  # nats-py forgets the socket of an attempt that was refused
        client._transport.close()  # type: ignore[no-untyped-call]
    server = servers[0]
    first_s, longest_s = BACKOFF_S
    mean_s = min(longest_s, first_s * 2.0 ** min(server.reconnects, 8))
    return server, mean_s * random.uniform(0.5, 1.5)
