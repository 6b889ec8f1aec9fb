"""Batching policies by name: those that ship, those that installed packages add, and classes in files.

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
    """Every name that `find_policy` knows, sorted; files come on top."""
    return KIND.names(BUILT_IN)


def find_policy(name: str) -> PolicyFactory:
    """What makes policy objects of that name; a built-in name cannot be taken over. Raises ConfigError."""
    return KIND.find(name, BUILT_IN)


def check_policy(name: str, settings: PolicySettings) -> None:
    """Make one that nobody uses: policies read their options when they are made. Raises ConfigError for a
    name, or an option, that is not known, for a value that cannot be used, and for a class that lacks a
    method of the contract."""
    factory = find_policy(name)
    KIND.made(name, lambda: factory(TRIAL_SHAPE, settings))
