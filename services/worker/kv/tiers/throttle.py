"""A tier made slow on purpose, for tests and benches that need a slow disk. Configuration; off by default."""

import threading
from time import monotonic


class Throttle:
    """At most so many bytes a second; 0 does not limit. Sleeps in the calling thread."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        if bytes_per_s < 0:
            raise ValueError("a speed cannot be negative")
        self._bytes_per_s = bytes_per_s
        self._never = threading.Event()

    def wait(self, size_bytes: int, until_s: float = float("inf")) -> bool:
        """Take as long as so many bytes need. False, after what is left of it, if that is past `until_s`
        (monotonic clock)."""
        if not self._bytes_per_s:
            return True
        needed_s, left_s = size_bytes / self._bytes_per_s, until_s - monotonic()
        self._never.wait(max(0.0, min(needed_s, left_s)))
        return needed_s <= left_s
