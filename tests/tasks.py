"""Work that goes on beside a test, and programs that run to their end."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


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


def ran(words: Sequence[str | Path], **fields: Any) -> "subprocess.CompletedProcess[str]":
    """Run a program in the project's folder and return what it wrote. `fields`: of `subprocess.run`."""
    usual: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 300}
    fields = {"stdin": subprocess.DEVNULL, **usual, **fields}
    return subprocess.run(words, check=fields.pop("check", False), **fields)
