"""Placement policies by name: those that ship, those that installed packages add, and classes in files.

A package declares an entry point in the group `kvasir.placement.policies`, whose value is called without
arguments; `my_file.py:MyPlacement` names a class in a file (`shared/plugins.py`).

Two kinds. A `PlacementPolicy` picks one of the workers that can take a sequence; which those are is not
its business (`services.placement.core.fleet`). A `PackingPolicy` keeps the books itself, decides which
worker is in use at all, and moves sequences.
"""

from collections.abc import Callable

from services.placement.policy.contract import PackingPolicy, PlacementPolicy
from services.placement.policy.dispatch import DispatchPolicy, LoadBalance
from services.placement.policy.fit import BestFit, PrefixAware, WorstFit
from services.placement.policy.mell import Mell
from services.placement.policy.mell.settings import EAGER
from shared.errors import ConfigError
from shared.plugins import PluginKind

KIND = PluginKind("kvasir.placement.policies", "placement policy", "policy", ("choose",))
POLICIES: dict[str, Callable[[], PlacementPolicy]] = {
    "best_fit": BestFit,
    "prefix_aware": PrefixAware,
    "worst_fit": WorstFit,
}
LIVE_PACKINGS = ("mell", "mell_eager", "load_balance")
"""Those that the service drives; the names of the others are policies of the first kind there."""
PACKINGS: dict[str, Callable[[int], PackingPolicy]] = {
    "mell": Mell,
    "mell_eager": lambda capacity_blocks: Mell(capacity_blocks, EAGER),
    "best_fit": lambda capacity_blocks: DispatchPolicy(capacity_blocks, is_tight=True),
    "worst_fit": lambda capacity_blocks: DispatchPolicy(capacity_blocks, is_tight=False),
    "load_balance": LoadBalance,
}


def create_packing(name: str, capacity_blocks: int) -> PackingPolicy:
    """A new packing policy for workers of that capacity. Raises ConfigError listing the names that exist."""
    if name not in PACKINGS:
        raise ConfigError(
            f"no packing policy {name!r}; there are {', '.join(sorted(PACKINGS))}", param="policy"
        )
    return PACKINGS[name](capacity_blocks)


def create(name: str) -> PlacementPolicy:
    """A new policy called `name`, ours before others'. Raises ConfigError listing the names that exist."""
    factory = KIND.find(name, POLICIES, LIVE_PACKINGS)
    return KIND.made(name, factory)
