"""The sides of a simulated comparison: a label, a policy, its predictor and its settings.

A side is one line of a table. `vllm` is two sides, with chunked prefill and without, of which a comparison
takes the better. Rivals get the paper's batch caps, the EcoServe family the paper's parameters of the
trace.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from bench.simulated import paper
from services.scheduler.policy import policy_names
from sim.case import Case, Machine
from sim.workloads import Source

PREDICTOR = "sigma0.5"
"""The truth times a log-normal error of σ 0.5. The paper's trained model, of whose padded predictions 22 to
30 % were too short, corresponds to σ 0.25."""


@dataclass(frozen=True, slots=True)
class Side:
    """`label` names it in tables and figures."""

    label: str
    policy: str
    predictor: str = PREDICTOR
    chunked_prefill: bool = True


RIVALS = (
    Side("vllm", "vllm", "none"),
    Side("vllm whole prompts", "vllm", "none", chunked_prefill=False),
    Side("fastgen", "fastgen", "none"),
    Side("orca", "orca", "none"),
)
OURS = (Side("ecoserve", "ecoserve"), Side("ecoserve_profile", "ecoserve_profile"), Side("kvasir", "kvasir"))
ORACLES = tuple(Side(f"{side.label} oracle", side.policy, "oracle") for side in OURS)
ABLATION = (
    Side("ecoserve_d", "ecoserve_d"),
    Side("ecoserve_sd", "ecoserve_sd"),
    Side("ecoserve_sdo", "ecoserve_sdo"),
)
OTHERS = (
    Side("fastserve", "fastserve", "none"),
    Side("srtf", "srtf"),
    Side("multires", "multires"),
    Side("sync_coupled", "sync_coupled"),
)
PREDICTORS = ("oracle", "sigma0.25", "sigma0.5", "sigma1", "histogram", "random", "short", "long", "none")


def existing(sides: Iterable[Side], predictor: str | None = None) -> list[Side]:
    """Those whose policy there is; `predictor` replaces the standard one."""
    known = set(policy_names())
    return [
        replace(side, predictor=predictor) if predictor and side.predictor == PREDICTOR else side
        for side in sides
        if side.policy in known
    ]


def case_of(side: Side, source: Source, machine: Machine, *, requests: int, seed: int) -> Case:
    """The side against that workload; the rate is still to be set."""
    is_eco = side.policy.startswith("ecoserve")
    options = paper.SETTINGS.get(source.name, {}) if is_eco else {}
    return Case(
        source=source,
        policy=side.policy,
        predictor=side.predictor,
        machine=machine,
        requests=requests,
        seed=seed,
        chunked_prefill=side.chunked_prefill,
        batch_sequences=paper.BATCH_SEQUENCES.get(side.policy),
        options=tuple(sorted(options.items())),
    )
