"""How long a client is willing to wait for its whole answer, in seconds of the monotonic clock.

Knows nothing of what is done until then; whoever waits asks what remains.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shared.clock import monotonic_s
from shared.errors import DeadlineExceeded, InvalidRequest

HEADER = "X-Request-Timeout"


@dataclass(frozen=True, slots=True)
class Deadline:
    """Of one request; counts from the arrival of its headers. Without `timeout_s` there is none."""

    began_s: float = 0.0
    timeout_s: float | None = None

    def remaining_s(self) -> float | None:
        """Never below 0; None when there is no deadline."""
        if self.timeout_s is None:
            return None
        return max(0.0, self.began_s + self.timeout_s - monotonic_s())

    def error(self) -> DeadlineExceeded:
        """What the client is told."""
        return DeadlineExceeded(f"the answer was not complete within the {self.timeout_s:g} s asked for")

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Ends what runs inside when the time is over. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(self.remaining_s()) as limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise self.error() from None


NONE = Deadline()


def deadline_of(header: str | None, default_s: float | None, longest_s: float, began_s: float) -> Deadline:
    """From `X-Request-Timeout`, else from the configuration.

    Raises InvalidRequest for what is no number of seconds above 0 and up to `longest_s`.
    """
    if header is None:
        return Deadline(began_s, default_s)
    try:
        timeout_s = float(header)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s <= longest_s:
        text = f"{HEADER} should be a number of seconds above 0 and at most {longest_s:g}"
        raise InvalidRequest(text, param=HEADER)
    return Deadline(began_s, timeout_s)
