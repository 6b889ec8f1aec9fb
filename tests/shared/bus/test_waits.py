"""Work that waits ends with what ended it."""

import asyncio

import pytest

from shared.bus.link import Waits
from shared.errors import BusUnavailable, PermissionRefused
from tests.patience import PATIENCE_S

LOST = BusUnavailable("lost")
REFUSED = PermissionRefused("refused")


async def forever() -> None:
    await asyncio.Event().wait()


async def immediately(value: int) -> int:
    return value


async def test_results_and_errors_pass_through() -> None:
    async def broken() -> None:
        raise ValueError("its own")

    waits = Waits()
    assert await waits.result(immediately(7)) == 7
    with pytest.raises(ValueError, match="its own"):
        await waits.result(broken())
    assert not await waits.is_done_within(broken(), 1.0)


async def test_a_loss_ends_everything_a_refusal_only_its_publishers() -> None:
    waits = Waits()
    lease = asyncio.create_task(waits.result(forever(), ("$KV.", "$JS.API.")))
    other = asyncio.create_task(waits.result(forever()))
    flush = asyncio.create_task(waits.is_done_within(forever(), 60.0))
    await asyncio.sleep(0)
    waits.fail_publishers("$js.api.stream.info.x", REFUSED)
    with pytest.raises(PermissionRefused):
        await lease
    assert not other.done()
    waits.fail_all(LOST)
    with pytest.raises(BusUnavailable):
        await other
    assert not await flush
    waits.fail_all(LOST)


async def test_late_work_goes_on_when_nobody_waits_for_it() -> None:
    waits, done = Waits(), asyncio.Event()

    async def slow() -> None:
        await asyncio.sleep(0.02)
        done.set()

    assert not await waits.is_done_within(slow(), 0.001)
    async with asyncio.timeout(PATIENCE_S):
        await done.wait()
    assert await waits.is_done_within(immediately(1), 5.0)


async def test_a_cancelled_waiter_takes_its_work_along() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await forever()
        finally:
            ended.set()

    waiting = asyncio.create_task(Waits().result(work()))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(PATIENCE_S):
        await ended.wait()
