"""Work that goes on beside a test."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def running(*work: Coroutine[Any, Any, object]) -> AsyncIterator[list[asyncio.Task[object]]]:
    """These coroutines as tasks, for the length of the block; whatever one raised is its own affair."""
    tasks: list[asyncio.Task[object]] = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
