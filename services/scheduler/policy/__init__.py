"""Registry of batching policies: built-in ones, entry points of installed packages, and classes in files.

A package declares an entry point in the group `kvasir.scheduler.policies`, whose value is a
`contract.PolicyFactory`. `my_file.py:MyPolicy` names a class in a file (`shared/plugins.py`).
"""

from services.scheduler.policy.contract import TRIAL_SHAPE, BatchPolicy, PolicyFactory, PolicySettings
from services.scheduler.policy.first_come import FastGenPolicy, OrcaPolicy, VllmPolicy
from services.scheduler.policy.kvasir import KvasirPolicy
from services.scheduler.policy.research.ecoserve.planner import EcoServe, EcoServeD, EcoServeSD, EcoServeSDO
from services.scheduler.policy.research.ecoserve.profile import EcoServeProfile
from services.scheduler.policy.research.foresight import MultiResPolicy, SyncCoupledPolicy
from services.scheduler.policy.research.ranked import FastServePolicy, SrtfPolicy
from shared.plugins import PluginKind

KIND = PluginKind(
    "kvasir.scheduler.policies",
    "batching policy",
    "policy",
    tuple(name for name in vars(BatchPolicy) if not name.startswith("_")),
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
    """Create the named policy for a check. Raises ConfigError for a wrong name, option or class."""
    factory = find_policy(name)
    KIND.made(name, lambda: factory(TRIAL_SHAPE, settings))
