"""Growth of a stack under long load: memory, descriptors, tasks and blocks, sampled at rest.

Growth is the slope of a line through the second half of the samples; caches fill in the first. It is the
steepest slope of any process; a restarted process counts as a new one. `grown_mb_most` is the most that any
process has grown since the first quarter, from the median of up to ten samples to that of the last ones.
"""

import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.kit.stacks import Stack
from bench.kit.stats import slope

KINDS = {"rss_mb": "MB", "descriptors": "", "tasks": "", "blocks": ""}
"""Units by kind."""
_HOUR_S = 3600.0
_LEAST, _ENDS = 4, 10
"""Least number of samples for a slope; number of those at either end of a growth."""


@dataclass
class Growth:
    """Samples by kind and process, as (seconds, value)."""

    samples: dict[str, dict[tuple[str, int], list[tuple[float, float]]]] = field(
        default_factory=lambda: {kind: defaultdict(list) for kind in KINDS}
    )

    run_dir_mb: float = 0.0
    """Most that the run directory had at a sample."""

    def take(self, stack: Stack, at_s: float) -> None:
        """Sample every process. Raises InternalError if the stack's status is missing."""
        pids = stack.pids()
        used = subprocess.run(["du", "-sk", str(stack.run_dir)], capture_output=True, check=False).stdout
        self.run_dir_mb = max(self.run_dir_mb, int(used.split()[0]) * 1024 / 1e6)
        for name, pid in pids.items():
            try:
                process = psutil.Process(pid)
                self.note("rss_mb", (name, pid), at_s, (process.memory_info().rss - _shared(pid)) / 1e6)
                self.note("descriptors", (name, pid), at_s, process.num_fds())
            except psutil.NoSuchProcess:
                continue
        for service in stack.services():
            key = (service["instance"], pids.get(service["instance"], 0))
            self.note("tasks", key, at_s, service.get("tasks", 0))
            details = service["details"]
            if "evictable_blocks" in details:
                unused = details["free_blocks"] + details["evictable_blocks"]
                self.note("blocks", key, at_s, details["total_blocks"] - unused)

    def note(self, kind: str, process: tuple[str, int], at_s: float, value: float) -> None:
        self.samples[kind][process].append((at_s, value))

    def last(self) -> list[dict[str, Any]]:
        """Return the newest samples, for the record."""
        now_s = max(one[-1][0] for by_process in self.samples.values() for one in by_process.values())
        return [
            {"kind": kind, "process": name, "pid": pid, "at_s": now_s, "value": samples[-1][1]}
            for kind, by_process in self.samples.items()
            for (name, pid), samples in by_process.items()
            if samples[-1][0] == now_s
        ]

    def figures(self) -> dict[str, float]:
        """Return the steepest growth of each kind per hour, without kinds that have too few samples."""
        slopes = {kind: slopes_of(by_process) for kind, by_process in self.samples.items()}
        found = {
            f"growth_{kind}_per_h": max(rise for _, rise in each) for kind, each in slopes.items() if each
        }
        return found | self._grown()

    def _grown(self) -> dict[str, float]:
        rss = self.samples["rss_mb"].values()
        quarter_s = max((samples[-1][0] for samples in rss), default=0.0) / 4
        later = [[mb for at_s, mb in samples if at_s >= quarter_s] for samples in rss]
        grown = [
            median(each[-ends:]) - median(each[:ends])
            for each in later
            if (ends := min(_ENDS, len(each) // 2))
        ]
        return {"grown_mb_most": max(grown), "run_dir_mb": self.run_dir_mb} if grown else {}

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return kind, process, first and last value, and growth per hour for the process with most
        growth."""
        made = []
        for kind, by_process in self.samples.items():
            if slopes := slopes_of(by_process):
                process, rise = max(slopes, key=lambda one: one[1])
                samples = by_process[process]
                ends = f"{samples[0][1]:.1f} → {samples[-1][1]:.1f} {KINDS[kind]}".strip()
                made.append((kind, process[0], ends, f"{rise:+.2f}"))
        return made


def _shared(pid: int) -> int:
    """Return the bytes of memory that processes share: rings of links, which are touched on first use."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssShmem:"):
                return int(line.split()[1]) * 1024
    return 0


def slopes_of(
    by_process: Mapping[tuple[str, int], Sequence[tuple[float, float]]],
) -> list[tuple[tuple[str, int], float]]:
    """Return the slope per hour of each process with enough samples in its second half."""
    later = {process: samples[len(samples) // 2 :] for process, samples in by_process.items()}
    return [(name, _HOUR_S * slope(half)) for name, half in later.items() if len(half) >= _LEAST]
