"""Batching policies by name: those that ship, and any that an installed package adds.

A third party declares an entry point in the group `kvasir.scheduler.policies`, whose value is a
`contract.PolicyFactory`; its name then works in the scheduler's configuration like a built-in one.
"""

from importlib.metadata import EntryPoint, entry_points

from services.scheduler.policy.contract import PolicyFactory, PolicySettings, WorkerShape
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
from shared.errors import ConfigError

ENTRY_POINT_GROUP = "kvasir.scheduler.policies"
_TRIAL_SHAPE = WorkerShape(block_tokens=16, capacity_blocks=4096)
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


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def policy_names() -> list[str]:
    """Every name that `find_policy` knows, sorted."""
    return sorted({*BUILT_IN, *_installed()})


def find_policy(name: str) -> PolicyFactory:
    """What makes policy objects of that name; a built-in name cannot be taken over. Raises ConfigError."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    point = _installed().get(name)
    if point is None:
        raise ConfigError(
            f"policy {name!r} is not known; write one of: {', '.join(policy_names())}", param="policy"
        )
    try:
        factory: PolicyFactory = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"policy {name!r} ({point.value}) cannot be loaded: {error}", param="policy"
        ) from error
    if not callable(factory):
        raise ConfigError(f"policy {name!r} ({point.value}) is not a factory of policies", param="policy")
    return factory


def check_policy(name: str, settings: PolicySettings) -> None:
    """Make one that nobody uses: policies read their options when they are made. Raises ConfigError for a
    name, or an option, that is not known, and for a value that cannot be used."""
    find_policy(name)(_TRIAL_SHAPE, settings)
