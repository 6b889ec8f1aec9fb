"""Work in threads: its result, its error, and a bound on what waits."""

import asyncio
import threading

import pytest

from services.gateway.threads import AT_ONCE, TokenizerThreads
from shared.errors import Overloaded


async def test_results_and_errors_come_back() -> None:
    threads = TokenizerThreads(1, 4)
    assert await threads.run(lambda: threading.current_thread().name) == "tokenizer_0"
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    threads.close()


async def test_what_waits_is_bounded() -> None:
    threads = TokenizerThreads(1, 2)
    release = threading.Event()
    waiting = [asyncio.create_task(threads.run(lambda: release.wait(10))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as caught:
        await threads.run(lambda: 1)
    assert caught.value.retry_after_s == 1.0
    release.set()
    assert await asyncio.gather(*waiting) == [True, True]
    assert await threads.run(lambda: 1) == 1
    threads.close()


async def test_little_is_done_at_once_and_without_a_thread() -> None:
    threads = TokenizerThreads(1, 1)
    here = threading.current_thread().name
    assert await threads.run(lambda: threading.current_thread().name, AT_ONCE) == here
    assert await threads.run(lambda: threading.current_thread().name, AT_ONCE + 1) == "tokenizer_0"
    threads.close()
