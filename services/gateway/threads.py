"""Threads that tokenize, so that a long text does not hold up the event loop.

Knows nothing of what they are given to do.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shared.errors import Overloaded

T = TypeVar("T")
AT_ONCE = 2048
_LARGE = AT_ONCE + 1


class TokenizerThreads:
    """`count` threads, and a bound on what waits for them."""

    def __init__(self, count: int, max_waiting: int) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="tokenizer")
        self._max_waiting = max_waiting
        self._waiting = 0

    async def run(self, work: Callable[[], T], size: int = _LARGE) -> T:
        """The result of `work`. Raises Overloaded when too many wait, or what `work` raises.

        `size` is of what is tokenized, in characters and tokens: little is done at once, in less time than it
        takes to wake a thread and be woken by it.
        """
        if size <= AT_ONCE:
            return work()
        if self._waiting >= self._max_waiting:
            raise Overloaded("too many requests are waiting to be tokenized", retry_after_s=1.0)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
