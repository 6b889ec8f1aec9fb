"""The simulated cells of `bench pie`: papers/004's models, data sets and memories, without and with Pie.

Requests arrive at one Poisson rate per model and data set: what `vllm` serves at most with 12 GB, where by
§5.3 it needs no preemption. Prompts over 1024 tokens are left out, as OPT's context is 2048. Knows no
printing.
"""

from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from sim.pie.cost import PieModel
from sim.pie.run import PieCase, PieSimulation
from sim.requests import SimRequest
from sim.summary import summarize
from sim.workloads import Source, poisson_requests

MODELS = {
    model.name: model
    for model in (
        PieModel("opt-13b", "opt-13b-h100", 40, 2 * 5120 * 2),
        PieModel("opt-30b", "opt-30b-h100", 48, 2 * 7168 * 2),
        PieModel("llama-13b", "llama2-13b-h100", 40, 2 * 5120 * 2),
    )
}
GIGABYTE = 1e9
ENOUGH_GB = 12.0
LONGEST_PROMPT_TOKENS = 1024
FIXED_EXPANSIONS = (1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4)


@dataclass(frozen=True)
class Question:
    """One run, picklable. `fifo_layers` None: adaptive."""

    model: str
    source: Source
    device_gb: float
    rate_per_s: float
    fifo_layers: int | None
    requests: int
    seed: int
    policy: str = "vllm"


@dataclass(frozen=True)
class Answer:
    tokens_per_s: float
    requests_per_s: float
    normalized_s: float
    evictions: float
    stall_share: float
    fifo_layers: int
    """At the end: the adaptive one's last length held under load is the highest."""


def requests_of(question: Question) -> list[SimRequest]:
    drawn = poisson_requests(question.source, count=2 * question.requests, rate_per_s=1.0, seed=question.seed)
    kept = [request for request in drawn if request.prompt_tokens <= LONGEST_PROMPT_TOKENS][
        : question.requests
    ]
    first_s, span_s = kept[0].arrival_s, kept[-1].arrival_s - kept[0].arrival_s
    scale = (len(kept) - 1) / span_s / question.rate_per_s
    return [replace(one, index=i, arrival_s=(one.arrival_s - first_s) * scale) for i, one in enumerate(kept)]


def answer(question: Question) -> Answer:
    """Run it to the end."""
    case = PieCase(
        MODELS[question.model], question.device_gb * GIGABYTE, question.fifo_layers, policy=question.policy
    )
    found = PieSimulation(case, requests_of(question)).finish()
    summary = summarize(found.outcome)
    return Answer(
        summary["tokens_per_s"],
        summary["requests_per_s"],
        summary["normalized_s"],
        summary["evictions"],
        found.stall_share,
        max(length for _, length in found.lengths),
    )


def fixed_lengths(model: PieModel) -> list[int]:
    """Queue lengths whose expansions are nearest to those of the paper's figure 6."""
    lengths = [round(model.layers + 2 - model.layers / wanted) for wanted in FIXED_EXPANSIONS]
    return [length for length, _ in groupby(sorted(length for length in lengths if length >= 3))]


def memory_saving(vllm: dict[float, float], pie: dict[float, float]) -> float:
    """The highest ratio of what `vllm` needs to what Pie has, at equal throughput. GB → tokens per second.

    Only where `vllm`'s curve reaches Pie's throughput (less 1 %: one noise); between its points it is linear.
    """
    sizes = sorted(vllm)
    best = 1.0
    for device_gb, reached in pie.items():
        wanted = 0.99 * reached
        for low, high in pairwise(sizes):
            if vllm[low] < wanted <= vllm[high]:
                needed = low + (high - low) * (wanted - vllm[low]) / (vllm[high] - vllm[low])
                best = max(best, needed / device_gb)
                break
    return best
