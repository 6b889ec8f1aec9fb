"""Many concurrent streams: failures, duration, and gateway memory per stream."""

import asyncio
import resource
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import uvloop

from bench.kit.load import Answer, Target, check, complete_all, first_error

_POLL_S = 0.02
_SPARE_FILES = 256


@dataclass(frozen=True)
class Held:
    """Result of many streams opened at once."""

    streams: int
    failures: int
    error: str
    opened_s: float
    """Until the last request was sent."""
    completed_s: float
    """Until the last answer ended."""
    first_token_s: float
    """Median time to the first token."""
    rss_before_mb: float
    peak_rss_mb: float

    @property
    def kb_per_stream(self) -> float:
        return (self.peak_rss_mb - self.rss_before_mb) * 1000 / self.streams


def hold(
    target: Target, bodies: Sequence[dict[str, Any]], tokens: int, gateway: psutil.Process, deadline_s: float
) -> Held:
    """Open a stream for each body. Memory is the gateway's resident memory in 10⁶ bytes."""
    _allow_files(len(bodies))
    before = gateway.memory_info().rss
    watch = _PeakMemory(gateway)
    began_s = time.perf_counter()
    with watch:
        found = uvloop.run(_bounded(target, bodies, deadline_s))
    firsts = sorted(one.event_s[0] - one.sent_s for one in found if one.event_s)
    return Held(
        streams=len(bodies),
        failures=check(found, tokens),
        error=first_error(found),
        opened_s=max(one.sent_s for one in found) - began_s,
        completed_s=max(one.ended_s for one in found) - began_s,
        first_token_s=firsts[len(firsts) // 2] if firsts else 0.0,
        rss_before_mb=before / 1e6,
        peak_rss_mb=max(watch.peak_bytes, before) / 1e6,
    )


async def _bounded(target: Target, bodies: Sequence[dict[str, Any]], deadline_s: float) -> list[Answer]:
    async with asyncio.timeout(deadline_s + 10.0):
        return await complete_all(target, bodies, deadline_s)


def _allow_files(streams: int) -> None:
    """Raise the limit of open files: each stream needs one descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = streams + _SPARE_FILES
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))


class _PeakMemory:
    """Samples a process's resident memory until its block ends."""

    def __init__(self, process: psutil.Process) -> None:
        self.peak_bytes = 0
        self._process = process
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(_POLL_S):
            try:
                self.peak_bytes = max(self.peak_bytes, self._process.memory_info().rss)
            except psutil.NoSuchProcess:
                return
