"""Many concurrent streams: failures, duration, and gateway memory per stream."""

import asyncio
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

from bench.kit.load import Answer, Target, check, complete_all, first_error


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
    _allow_files()
    before = gateway.memory_info().rss
    Path(f"/proc/{gateway.pid}/clear_refs").write_text("5")  # resets its peak memory
    began_s = time.perf_counter()
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
        peak_rss_mb=max(_peak_bytes(gateway), before) / 1e6,
    )


async def _bounded(target: Target, bodies: Sequence[dict[str, Any]], deadline_s: float) -> list[Answer]:
    async with asyncio.timeout(deadline_s + 10.0):
        return await complete_all(target, bodies, deadline_s)


def _allow_files() -> None:
    """Raise the limit of open files: each stream needs one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _peak_bytes(process: psutil.Process) -> int:
    """Return the process's peak resident memory."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
