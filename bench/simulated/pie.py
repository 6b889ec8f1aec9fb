"""Pie at its paper's settings, for `python -m bench papers`, and its figure 4.

The live swap and expansion controllers run in simulated time (`sim/pie`) under the `vllm` policy, with
GH200's measured bandwidth and H100 kernel costs.
"""

from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from services.worker.pie.core.sizes import expansion
from sim.pie.cost import GH200, Interconnect, PieModel
from sim.pie.run import PieCase, PieSimulation
from sim.pie.swap import SwapController
from sim.pie.timeline import Pace, Timeline
from sim.requests import SimRequest
from sim.summary import summarize
from sim.workloads import Source, poisson_requests

_LAYERS, _PACE, _TOKENS = 9, Pace(compute=1, swap_in=2, swap_out=2), 20


def figure4() -> dict[str, float]:
    """Return figure 4: seven slots, and six, which stall; and the layers copied in per token."""
    seven, six = (Timeline(SwapController(_LAYERS, fifo_layers), _PACE) for fifo_layers in (4, 5))
    seven.run(_TOKENS)
    six.run(_TOKENS)
    return {
        "fig4_expansion": round(expansion(_LAYERS, 4), 3),
        "fig4_stalls": float(sum(seven.stalls)),
        "fig4_fifo_layer_times": sum(seven.fifo_ticks) / len(seven.fifo_ticks),
        "fig4_stalls_six_slots": sum(six.stalls) / _TOKENS,
        "fig4_layers_in": float(seven.controller.swap_ins) / _TOKENS,
    }


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
    """One run, picklable. With `fifo_layers` None, the queue is adaptive."""

    model: str
    source: Source
    device_gb: float
    rate_per_s: float
    fifo_layers: int | None
    requests: int
    seed: int
    policy: str = "vllm"
    link: Interconnect = GH200


@dataclass(frozen=True)
class Answer:
    tokens_per_s: float
    requests_per_s: float
    normalized_s: float
    stall_share: float
    lengths: tuple[tuple[float, int], ...]
    """(time in s, queue length) at each change."""


def requests_of(question: Question) -> list[SimRequest]:
    drawn = poisson_requests(question.source, count=2 * question.requests, rate_per_s=1.0, seed=question.seed)
    kept = [request for request in drawn if request.prompt_tokens <= LONGEST_PROMPT_TOKENS][
        : question.requests
    ]
    first_s, span_s = kept[0].arrival_s, kept[-1].arrival_s - kept[0].arrival_s
    scale = (len(kept) - 1) / span_s / question.rate_per_s
    return [replace(one, index=i, arrival_s=(one.arrival_s - first_s) * scale) for i, one in enumerate(kept)]


def answer(question: Question) -> Answer:
    """Run one question to the end."""
    case = PieCase(
        MODELS[question.model],
        question.device_gb * GIGABYTE,
        question.fifo_layers,
        policy=question.policy,
        link=question.link,
    )
    found = PieSimulation(case, requests_of(question)).finish()
    summary = summarize(found.outcome)
    return Answer(
        summary["tokens_per_s"],
        summary["requests_per_s"],
        summary["normalized_s"],
        found.stall_share,
        tuple(found.lengths),
    )


def fixed_lengths(model: PieModel) -> list[int]:
    """Return the queue lengths nearest to the expansions of the paper's figure 6."""
    lengths = [round(model.layers + 2 - model.layers / wanted) for wanted in FIXED_EXPANSIONS]
    return [length for length, _ in groupby(sorted(length for length in lengths if length >= 3))]


def memory_saving(vllm: dict[float, float], pie: dict[float, float]) -> float:
    """Return the highest ratio of `vllm`'s memory to Pie's at equal throughput; arguments map GB to tokens
    per second.

    Only where `vllm`'s curve, linear between points, reaches 99 % of Pie's throughput (1 % is noise).
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
