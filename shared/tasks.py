"""Waits for the first of several works."""

import asyncio
from collections.abc import Awaitable
from typing import Any


async def first_ended(*works: Awaitable[Any]) -> list[asyncio.Future[Any] | None]:
    """Wait until one of these has ended and cancel the others, which are None in what it returns."""
    futures = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        return [future if future.done() else None for future in futures]
    finally:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)


async def until_first(*works: Awaitable[Any]) -> None:
    """Run until one of the works ends, and cancel the others. Raise its exception."""
    for ended in await first_ended(*works):
        if ended is not None:
            ended.result()
