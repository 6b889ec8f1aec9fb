"""Threads in which requests are read and tokenized, so that a large one does not hold up the event loop.

Knows nothing of what they are given to do.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shared.errors import Overloaded

T = TypeVar("T")
AT_ONCE_BYTES = 4096
MAX_WAITING_BYTES = 128 * 1024 * 1024


class TokenizerThreads:
    """One thread that reads, `count` that encode, and a bound on how much waits for them, in requests and in
    bytes.

    Reading (JSON, validation) holds the interpreter lock, for a tenth of a second where a body is large. Two
    threads that do would hand it to each other, past the event loop; one leaves it to the loop in between.
    Encoding releases it.
    """

    def __init__(self, count: int, max_waiting: int) -> None:
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._encoders = ThreadPoolExecutor(count, thread_name_prefix="tokenizer")
        self._max_waiting = max_waiting
        self._waiting = 0
        self._waiting_bytes = 0

    async def read(self, work: Callable[[], T], size_bytes: int) -> T:
        """The result of `work`. Raises Overloaded when too much waits, or what `work` raises.

        `size_bytes` is of the request's body: nothing in it, be it text, tokens, messages or names of fields,
        can cost more than it is long. Little is done at once, in less time than it takes to wake a thread and
        be woken by it.
        """
        return work() if size_bytes <= AT_ONCE_BYTES else await self._run(self._reader, work, size_bytes)

    async def encode(self, work: Callable[[], T], size_bytes: int) -> T:
        """As `read`."""
        return work() if size_bytes <= AT_ONCE_BYTES else await self._run(self._encoders, work, size_bytes)

    async def _run(self, threads: ThreadPoolExecutor, work: Callable[[], T], size_bytes: int) -> T:
        is_too_much = self._waiting_bytes + size_bytes > MAX_WAITING_BYTES and self._waiting > 0
        if is_too_much or self._waiting >= self._max_waiting:
            raise Overloaded("too many requests are waiting to be tokenized: try again", retry_after_s=1.0)
        self._waiting += 1
        self._waiting_bytes += size_bytes
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, work)
        finally:
            self._waiting -= 1
            self._waiting_bytes -= size_bytes

    def close(self) -> None:
        for threads in (self._reader, self._encoders):
            threads.shutdown(wait=False, cancel_futures=True)
