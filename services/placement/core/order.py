"""Orders in which waiting prompts are placed.

`policy`: as the batching policy ranks them. `fcfs`: by arrival. `fpf`: nearest cached prefix first; a prompt
with a distant prefix may starve among the ones asked about together. `relaxed_fpf`: largest waited time · (4
- N) first. N is 0 for a prefix on the device, 1 host, 2 disk, 3 not cached. Priority takes precedence, and
ties keep the given order. Pure. Source: papers/002 §V-F; `algorithms.md` §5.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.placement.core.prefix_index import CachedTokens
from shared.errors import ConfigError
from shared.messages.commands import PlacementItem

NOT_CACHED = 3
_LEAST_SHARE = 0.25
"""Minimum share of a prompt that must be cached."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Waiting time and prefix distance of one prompt."""

    waited_s: float
    distance: int
    """N of the module docstring: the tier of its prefix."""
    priority: int = 0


PlacementRank = Callable[[Waiting], float]
"""Sort key, lowest first; ties keep the given order."""
ORDERS: dict[str, PlacementRank] = {
    "policy": lambda waiting: 0.0,
    "fcfs": lambda waiting: -waiting.waited_s,
    "fpf": lambda waiting: waiting.distance,
    "relaxed_fpf": lambda waiting: -waiting.waited_s * (NOT_CACHED + 1 - waiting.distance),
}


def find_order(name: str) -> PlacementRank:
    """Return the order of that name. Raises ConfigError if it is unknown."""
    if name not in ORDERS:
        raise ConfigError(f"order {name!r} is not known; write one of: {', '.join(ORDERS)}", param="order")
    return ORDERS[name]


def distance(item: PlacementItem, offers: Sequence[CachedTokens]) -> int:
    """Return N at the worker with the longest cached prefix: the mean tier of its cached tokens."""
    tokens = max(offers, key=lambda offer: (sum(offer), offer), default=(0, 0, 0))
    if sum(tokens) == 0 or sum(tokens) < _LEAST_SHARE * item.size_tokens:
        return NOT_CACHED
    return round(sum(tier * count for tier, count in enumerate(tokens)) / sum(tokens))


def arrange(waiting: Sequence[Waiting], rank: PlacementRank) -> list[int]:
    """Return positions in placement order."""
    return sorted(range(len(waiting)), key=lambda at: (waiting[at].priority, rank(waiting[at])))
