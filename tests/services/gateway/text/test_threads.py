"""Work in threads: its result, its error, and a bound on what waits."""

import asyncio
import threading
import time

import pytest

from services.gateway.text.tokenizer import AT_ONCE_BYTES, MAX_WAITING_BYTES, TokenizerThreads
from shared.errors import Overloaded

LARGE = AT_ONCE_BYTES + 1


async def test_results_and_errors_come_back() -> None:
    threads = TokenizerThreads(1, 4)
    assert await threads.encode(lambda: threading.current_thread().name, LARGE) == "tokenizer_0"
    with pytest.raises(ZeroDivisionError):
        await threads.encode(lambda: 1 // 0, LARGE)
    threads.close()


async def test_what_waits_is_bounded() -> None:
    threads = TokenizerThreads(1, 2)
    release = threading.Event()
    waiting = [asyncio.create_task(threads.encode(lambda: release.wait(10), LARGE)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as caught:
        await threads.encode(lambda: 1, LARGE)
    assert caught.value.retry_after_s == 1.0
    release.set()
    assert await asyncio.gather(*waiting) == [True, True]
    assert await threads.encode(lambda: 1, LARGE) == 1
    threads.close()


async def test_little_is_done_at_once_and_without_a_thread() -> None:
    threads = TokenizerThreads(1, 1)
    here = threading.current_thread().name
    assert await threads.encode(lambda: threading.current_thread().name, AT_ONCE_BYTES) == here
    assert await threads.encode(lambda: threading.current_thread().name, LARGE) == "tokenizer_0"
    threads.close()


async def test_what_waits_is_bounded_in_bytes_too() -> None:
    """Two thousand bodies of four megabytes are few requests and much memory."""
    threads = TokenizerThreads(1, 2048)
    release = threading.Event()
    first = asyncio.create_task(threads.encode(lambda: release.wait(10), MAX_WAITING_BYTES - LARGE))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="try again"):
        await threads.encode(lambda: 1, LARGE + 1)
    second = asyncio.create_task(threads.encode(lambda: 2, LARGE))
    release.set()
    assert (await first, await second) == (True, 2)
    assert await threads.encode(lambda: 3, 2 * MAX_WAITING_BYTES) == 3, "one alone is taken whatever its size"
    threads.close()


async def test_one_body_is_read_at_a_time() -> None:
    """Two that are read at once keep the interpreter lock between them, and all streams wait for both."""
    threads = TokenizerThreads(4, 100)
    at_work: list[str] = []

    def work() -> int:
        at_work.append(threading.current_thread().name)
        time.sleep(0.005)
        return len(at_work)

    seen = await asyncio.gather(*(threads.read(work, LARGE) for _ in range(5)))
    assert seen == [1, 2, 3, 4, 5]
    assert set(at_work) == {"reader_0"}
    assert await threads.read(lambda: threading.current_thread().name, AT_ONCE_BYTES) != "reader_0"
    threads.close()
