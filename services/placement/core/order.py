"""In which order waiting prompts are placed: as the batching policy ranks them, or by how near the device
their prefix lies.

`policy`: as they are asked about. `fcfs`: as they arrived. `fpf`: nearest prefix first; one whose prefix is
far may starve while nearer ones keep arriving, among those that are asked about at once. `relaxed_fpf`:
largest waited time · (4 - N) first. N is 0 for a prefix on the device, 1 host, 2 disk, 3 not cached; equal
ones as asked. A lower priority comes before all of this. Combines with any batching policy: this is the queue
before a worker. Pure. Source: papers/002 §V-F; `algorithms.md` §5.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.placement.core.prefix_index import CachedTokens
from shared.errors import ConfigError
from shared.messages.commands import PlacementItem

NOT_CACHED = 3
_LEAST_SHARE = 0.25
"""Of a prompt, to count as cached."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What an order looks at of one prompt: how long it has waited, and how near its prefix lies."""

    waited_s: float
    distance: int
    """N."""
    priority: int = 0


PlacementRank = Callable[[Waiting], float]
"""Lowest first; of equal ones that which was asked for first."""
ORDERS: dict[str, PlacementRank] = {
    "policy": lambda waiting: 0.0,
    "fcfs": lambda waiting: -waiting.waited_s,
    "fpf": lambda waiting: waiting.distance,
    "relaxed_fpf": lambda waiting: -waiting.waited_s * (NOT_CACHED + 1 - waiting.distance),
}


def find_order(name: str) -> PlacementRank:
    """Raises ConfigError for a name that is not known."""
    if name not in ORDERS:
        raise ConfigError(f"order {name!r} is not known; write one of: {', '.join(ORDERS)}", param="order")
    return ORDERS[name]


def distance(item: PlacementItem, offers: Sequence[CachedTokens]) -> int:
    """N at the worker that has most of it: the tier, on average, of what is cached."""
    tokens = max(offers, key=lambda offer: (sum(offer), offer), default=(0, 0, 0))
    if sum(tokens) == 0 or sum(tokens) < _LEAST_SHARE * item.size_tokens:
        return NOT_CACHED
    return round(sum(tier * count for tier, count in enumerate(tokens)) / sum(tokens))


def arrange(waiting: Sequence[Waiting], rank: PlacementRank) -> list[int]:
    """Their positions, the one to be placed first first."""
    return sorted(range(len(waiting)), key=lambda at: (waiting[at].priority, rank(waiting[at])))
