"""The variants that papers/003 §4 compares, and one beyond it, by what each adds to the one before.

`ecoserve_d` → `_sd` (+ synced groups) → `_sdo` (+ ordering) → `ecoserve` (+ KVC pipelining);
`ecoserve_profile` has the exact admission rule instead of the halving slots (algorithms.md §1).
"""

from services.scheduler.policy.ecoserve.hosting import HostingPolicy
from services.scheduler.policy.ecoserve.planner import DecoupledPolicy
from services.scheduler.policy.ecoserve.profiling import ProfilingPolicy


class EcoServeD(DecoupledPolicy):
    """Decoupled queues, first come first served, exact allocation."""


class EcoServeSD(DecoupledPolicy):
    synced = True


class EcoServeSDO(DecoupledPolicy):
    synced = ordered = True


class EcoServe(HostingPolicy):
    synced = ordered = True


class EcoServeProfile(ProfilingPolicy):
    synced = ordered = True
