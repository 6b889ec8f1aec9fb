"""Orders in which waiting prompts get their workers. Pure."""

from collections.abc import Callable, Sequence

from services.placement.core.prefix_index import CachedTokens
from shared.errors import ConfigError
from shared.messages.commands import PlacementItem

NOT_CACHED = 3
LEAST_SHARE = 0.25
"""Minimum share of a prompt that must be cached."""

PlacementRank = Callable[[float, int], float]
"""Sort key of a prompt from its waited seconds and N, lowest first."""
ORDERS: dict[str, PlacementRank] = {
    "policy": lambda waited_s, distance: 0.0,
    "fcfs": lambda waited_s, distance: -waited_s,
    "fpf": lambda waited_s, distance: distance,
    "relaxed_fpf": lambda waited_s, distance: -waited_s * (NOT_CACHED + 1 - distance),
}
"""Orders in which waiting prompts are placed (papers/002 §V-F; `algorithms.md` §5). `policy`: as the batching
policy ranks them. `fcfs`: by arrival. `fpf`: nearest cached prefix first; a prompt with a distant prefix may
starve among the ones asked about together. `relaxed_fpf`: largest waited time · (4 - N) first. N is 0 for a
prefix on the device, 1 host, 2 disk, 3 not cached."""


def find_order(name: str) -> PlacementRank:
    """Return the order of that name. Raises ConfigError if it is unknown."""
    if name not in ORDERS:
        raise ConfigError(f"order {name!r} is not known; write one of: {', '.join(ORDERS)}", param="order")
    return ORDERS[name]


def distance(item: PlacementItem, offers: Sequence[CachedTokens]) -> int:
    """Return N at the worker with the longest cached prefix: the mean tier of its cached tokens."""
    tokens = max(offers, key=lambda offer: (sum(offer), offer), default=(0, 0, 0))
    if sum(tokens) == 0 or sum(tokens) < LEAST_SHARE * item.size_tokens:
        return NOT_CACHED
    return round(sum(tier * count for tier, count in enumerate(tokens)) / sum(tokens))


def arrange(items: Sequence[PlacementItem], distances: Sequence[int], rank: PlacementRank) -> list[int]:
    """Return positions in placement order: by priority, then rank, then as given."""
    ranks = [(item.priority, rank(item.waited_s, n)) for item, n in zip(items, distances, strict=True)]
    return sorted(range(len(items)), key=ranks.__getitem__)
