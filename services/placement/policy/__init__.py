"""Placement policies, by name. The entry-point group `kvasir.placement.policies` adds others from outside.

A policy picks one of the workers that can take a sequence; which those are is not its business
(`services.placement.state`).
"""

from collections.abc import Callable
from importlib.metadata import entry_points

from services.placement.policy.base import PlacementPolicy
from services.placement.policy.best_fit import BestFit
from services.placement.policy.prefix_aware import PrefixAware
from services.placement.policy.worst_fit import WorstFit
from shared.errors import ConfigError

ENTRY_POINT_GROUP = "kvasir.placement.policies"
POLICIES: dict[str, Callable[[], PlacementPolicy]] = {
    "best_fit": BestFit,
    "prefix_aware": PrefixAware,
    "worst_fit": WorstFit,
}


def create(name: str) -> PlacementPolicy:
    """A new policy called `name`, ours before others'. Raises ConfigError listing the names that exist."""
    if name in POLICIES:
        return POLICIES[name]()
    outside = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in outside:
        names = ", ".join(sorted({*POLICIES, *outside}))
        raise ConfigError(f"no placement policy {name!r}; there are {names}", param="policy")
    policy: PlacementPolicy = outside[name].load()()
    return policy
