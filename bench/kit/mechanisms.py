"""What a stack may do where memory is short, as settings: each mechanism alone, to be merged, and all off."""

from collections.abc import Mapping

Settings = Mapping[str, object]
"""Of a stack, by `section.name`."""

OFF: Settings = {
    "worker.prefix_cache.enabled": False,
    "worker.lending.lend": False,
    "worker.lending.borrow": False,
    "scheduler.relief": False,
    "worker.pie.enabled": False,
}
"""Sequences that no longer fit are computed again later; what is longer than a worker is refused."""
CACHE: Settings = {"worker.prefix_cache.enabled": True}
"""With a tier on the host."""
LENDING: Settings = {"worker.lending.lend": True, "worker.lending.borrow": True}
RELIEF: Settings = {"scheduler.relief": True}
"""The ladder: sequences are moved, paused and, where there is a cache, swapped."""
PIE: Settings = {"worker.pie.enabled": True}
"""Blocks swapped to own host memory behind the computation."""
