"""Registry of batching policies: built-in ones, entry points of installed packages, and classes in files.

A package declares an entry point in the group `kvasir.scheduler.policies`, whose value is a
`contract.PolicyFactory`. `my_file.py:MyPolicy` names a class in a file (`shared/plugins.py`).
"""

from services.scheduler.policy.contract import TRIAL_SHAPE, PolicyFactory, PolicySettings
from services.scheduler.policy.first_come import FastGenPolicy, OrcaPolicy, VllmPolicy
from services.scheduler.policy.kvasir import KvasirPolicy
from services.scheduler.policy.research.ecoserve.planner import (
    EcoServe,
    EcoServeD,
    EcoServeProfile,
    EcoServeSD,
    EcoServeSDO,
)
from services.scheduler.policy.research.fastserve import FastServePolicy
from services.scheduler.policy.research.multires import MultiResPolicy
from services.scheduler.policy.research.ranked import SrtfPolicy
from services.scheduler.policy.research.sync_coupled import SyncCoupledPolicy
from shared.plugins import PluginKind

KIND = PluginKind(
    "kvasir.scheduler.policies",
    "batching policy",
    "policy",
    (
        "on_arrival",
        "on_adopted",
        "on_ended",
        "on_short",
        "on_prefix_hit",
        "on_resized",
        "on_measured",
        "on_predicted",
        "plan",
        "check_integrity",
    ),
)
BUILT_IN: dict[str, PolicyFactory] = {
    "ecoserve": EcoServe,
    "ecoserve_d": EcoServeD,
    "ecoserve_profile": EcoServeProfile,
    "ecoserve_sd": EcoServeSD,
    "ecoserve_sdo": EcoServeSDO,
    "fastgen": FastGenPolicy,
    "fastserve": FastServePolicy,
    "kvasir": KvasirPolicy,
    "multires": MultiResPolicy,
    "orca": OrcaPolicy,
    "srtf": SrtfPolicy,
    "sync_coupled": SyncCoupledPolicy,
    "vllm": VllmPolicy,
}


def policy_names() -> list[str]:
    """Return all names that `find_policy` accepts, sorted, apart from files."""
    return KIND.names(BUILT_IN)


def find_policy(name: str) -> PolicyFactory:
    """Return the factory of a policy; built-in names cannot be overridden. Raises ConfigError."""
    return KIND.find(name, BUILT_IN)


def check_policy(name: str, settings: PolicySettings) -> None:
    """Check a policy's name and options by creating one. Raises ConfigError for an unknown name or option, an
    unusable value, or a class without all methods of the contract."""
    factory = find_policy(name)
    KIND.made(name, lambda: factory(TRIAL_SHAPE, settings))
