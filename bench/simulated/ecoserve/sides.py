"""Sides of a simulated comparison: label, policy, predictor and settings.

`vllm` is two sides, with and without chunked prefill; a comparison uses the better one. Rivals get the
paper's batch limits, the EcoServe family the paper's parameters for the trace.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from services.scheduler.policy import policy_names
from sim.case import Case, Machine
from sim.workloads import Source

SETTINGS: dict[str, dict[str, float]] = {
    "alpaca": {"pad": 0.10, "reserve_ratio": 0.012, "buffer": 0.15},
    "sharegpt": {"pad": 0.15, "reserve_ratio": 0.03, "buffer": 0.15},
    "books": {"pad": 0.20, "reserve_ratio": 0.05, "buffer": 0.10},
}
"""EcoServe's settings per trace: padding and reserve of §2.3, buffer of §4."""

BATCH_SEQUENCES = {"orca": 8, "fastserve": 8}
"""Batch limits of §2.1; memory bounds the others."""

BEST: dict[str, dict[str, float]] = {
    "pad": {"alpaca": 0.10, "sharegpt": 0.15, "books": 0.20},
    "reserve_ratio": {"alpaca": 0.02, "sharegpt": 0.03, "books": 0.04},
    "buffer": {"alpaca": 0.15, "sharegpt": 0.15, "books": 0.10},
}
"""Best value of each parameter in figure 12."""


PREDICTOR = "sigma0.5"
"""Truth times a log-normal error of σ 0.5. The paper's trained model corresponds to σ 0.25: 22 to 30 % of
its padded predictions were too short."""


@dataclass(frozen=True, slots=True)
class PolicySide:
    """One line of a table, named `label`."""

    label: str
    policy: str
    predictor: str = PREDICTOR
    chunked_prefill: bool = True


RIVALS = (
    PolicySide("vllm", "vllm", "none"),
    PolicySide("vllm whole prompts", "vllm", "none", chunked_prefill=False),
    PolicySide("fastgen", "fastgen", "none"),
    PolicySide("orca", "orca", "none"),
)
OURS = (
    PolicySide("ecoserve", "ecoserve"),
    PolicySide("ecoserve_profile", "ecoserve_profile"),
    PolicySide("kvasir", "kvasir"),
)
ORACLES = tuple(PolicySide(f"{side.label} oracle", side.policy, "oracle") for side in OURS)
ABLATION = (
    PolicySide("ecoserve_d", "ecoserve_d"),
    PolicySide("ecoserve_sd", "ecoserve_sd"),
    PolicySide("ecoserve_sdo", "ecoserve_sdo"),
)
OTHERS = (
    PolicySide("fastserve", "fastserve", "none"),
    PolicySide("srtf", "srtf"),
    PolicySide("multires", "multires"),
    PolicySide("sync_coupled", "sync_coupled"),
)
PREDICTORS = ("oracle", "sigma0.25", "sigma0.5", "sigma1", "histogram", "random", "short", "long", "none")


def existing(sides: Iterable[PolicySide], predictor: str | None = None) -> list[PolicySide]:
    """Return the sides whose policy exists; `predictor` replaces the standard one."""
    known = set(policy_names())
    return [
        replace(side, predictor=predictor) if predictor and side.predictor == PREDICTOR else side
        for side in sides
        if side.policy in known
    ]


def case_of(side: PolicySide, source: Source, machine: Machine, *, requests: int, seed: int) -> Case:
    """Return the case of a side on a workload, without a rate."""
    is_eco = side.policy.startswith("ecoserve")
    options = SETTINGS.get(source.name, {}) if is_eco else {}
    return Case(
        source=source,
        policy=side.policy,
        predictor=side.predictor,
        machine=machine,
        requests=requests,
        seed=seed,
        chunked_prefill=side.chunked_prefill,
        batch_sequences=BATCH_SEQUENCES.get(side.policy),
        options=tuple(sorted(options.items())),
    )
