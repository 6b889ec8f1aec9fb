"""Settings of a stack for short memory: each mechanism alone, and all off. They can be merged."""

from collections.abc import Mapping

Settings = Mapping[str, object]
"""Settings of a stack, by `section.name`."""

OFF: Settings = {
    "worker.prefix_cache.enabled": False,
    "worker.lending.lend": False,
    "worker.lending.borrow": False,
    "scheduler.relief": False,
    "worker.pie.enabled": False,
}
"""Evicted sequences are recomputed, and requests larger than a worker are refused."""
CACHE: Settings = {"worker.prefix_cache.enabled": True}
"""Prefix cache with a tier on the host."""
LENDING: Settings = {"worker.lending.lend": True, "worker.lending.borrow": True}
RELIEF: Settings = {"scheduler.relief": True}
"""Relief ladder: sequences are migrated, paused or, with a cache, swapped."""
PIE: Settings = {"worker.pie.enabled": True}
"""Blocks are swapped to the worker's host memory during the computation."""
