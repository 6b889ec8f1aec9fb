"""How long a test waits for what has to come.

It comes within milliseconds. The deadline is for a machine that is busy with other things: it is long, and it
is the same everywhere. A shorter one is written only where the time itself is what the test is about.
"""

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 30.0
STACK_PATIENCE_S = 120.0
"""For what a whole stack does in a few seconds: on a busy machine each of its processes waits its turn."""

BUSY_S = 10.0
"""Beside a time that Kvasir keeps (a lease, a heartbeat): by so much a busy machine may be late with it."""


async def until(condition: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Returns as soon as it holds; fails the test when it does not within the seconds given."""
    try:
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"it did not come to that within {within_s:g} s") from None


def wait_until(condition: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """The same without an event loop."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"it did not come to that within {within_s:g} s"
        time.sleep(0.005)
