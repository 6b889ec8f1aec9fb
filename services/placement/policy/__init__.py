"""Placement policies by name: built-in ones, those of installed packages, and classes in files.

A package declares an entry point in the group `kvasir.placement.policies`, called without arguments.
`my_file.py:MyPlacement` names a class in a file (`shared/plugins.py`).
"""

from collections.abc import Callable

from services.placement.policy.contract import PackingPolicy, PlacementPolicy
from services.placement.policy.dispatch import DispatchPolicy, LoadBalance
from services.placement.policy.fit import BestFit, PrefixAware, WorstFit
from services.placement.policy.mell import Mell
from services.placement.policy.mell.cluster import EAGER
from shared.errors import ConfigError
from shared.plugins import PluginKind

KIND = PluginKind("kvasir.placement.policies", "placement policy", "policy", ("choose",))
POLICIES: dict[str, Callable[[], PlacementPolicy]] = {
    "best_fit": BestFit,
    "prefix_aware": PrefixAware,
    "worst_fit": WorstFit,
}
LIVE_PACKINGS = ("mell", "mell_eager", "load_balance")
"""Packing policies that the service can run. It runs `best_fit` and `worst_fit` as `PlacementPolicy` only."""
PACKINGS: dict[str, Callable[[int], PackingPolicy]] = {
    "mell": Mell,
    "mell_eager": lambda capacity_blocks: Mell(capacity_blocks, EAGER),
    "best_fit": lambda capacity_blocks: DispatchPolicy(capacity_blocks, is_tight=True),
    "worst_fit": lambda capacity_blocks: DispatchPolicy(capacity_blocks, is_tight=False),
    "load_balance": LoadBalance,
}


def create_packing(name: str, capacity_blocks: int) -> PackingPolicy:
    """Return a new packing policy for workers of that capacity. Raises ConfigError (unknown name)."""
    if name not in PACKINGS:
        raise ConfigError(
            f"no packing policy {name!r}; there are {', '.join(sorted(PACKINGS))}", param="policy"
        )
    return PACKINGS[name](capacity_blocks)


def create(name: str) -> PlacementPolicy:
    """Return a new policy; built-in names take precedence. Raises ConfigError (unknown name)."""
    factory = KIND.find(name, POLICIES, LIVE_PACKINGS)
    return KIND.made(name, factory)
