"""Claims of Infinite-LLM (papers/001 §6): context lengths, mixed contexts, DGFM and DistAttention."""

import itertools
from dataclasses import replace
from statistics import fmean

import torch

from bench.kit.cores import Cores
from bench.micro.distattention.attention import measure_cells
from bench.papers.claims import Claim, Effort, Figures, Picture, Rule, Study, points
from services.worker.core.costs import find_cost
from services.worker.core.costs.fitted import DecodePart, FittedCost, RemoteCost
from sim.case import slowed
from sim.lending.run import LendingSimulation, Scenario
from sim.lending.workload import LendingJob, Mix

_ALONE_TOKENS = 108_032
"""Longest context of LLaMA2-7B on one A100 (§6.3), in whole blocks."""
_INSTANCE_TOKENS = 150_016
"""KV of a LLaMA2-13B instance on two A100."""
_FIGURE_8 = ("lent", "tensor parallel", "the same without loss", "static split, long ones refused")
_STEPS = 20
"""Steps of the search for the longest context, per instance."""


def contexts(effort: Effort) -> Figures:
    """Search the longest context that the live lending decisions place on idle instances."""
    found: dict[str, float] = {}
    for instances in effort.pick((2, 4, 8, 16, 32), (2, 32)):
        name = "many" if instances == 32 else str(instances)
        for label, suffix, most in (("half of it lent", "", 0.5), ("all of it lent", "_all_lent", 1.0)):
            longest = found[f"context_{name}{suffix}"] = _longest(instances, most)
            found |= points("infinite-llm-fig7", {label: {instances: longest}})
    return found


def _longest(instances: int, most_lent: float) -> float:
    """Return the longest context over that of one instance."""
    low, high = 1, 2 * instances * _STEPS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(middle, instances, most_lent) else (low, middle)
    return low / _STEPS


def _fits(length: int, instances: int, most_lent: float) -> bool:
    """Whether an instance starts a request of so many steps while the others have free memory."""
    scenario = Scenario(workers=instances, kv_tokens=_ALONE_TOKENS, repays=False, most_lent=most_lent)
    run = LendingSimulation(scenario)
    for name, member in run.members.items():
        tokens = length * _ALONE_TOKENS // _STEPS if name == "w0" else 1
        member.stream = (LendingJob(*job, 1) for job in zip(itertools.count(), itertools.repeat(tokens)))
    for _ in range(4):
        run.interval()
    return run.members["w0"].prefilled_tokens > 0


def mixed(effort: Effort) -> Figures:
    """Compare four instances of two GPUs that lend with one instance of all eight, requests always waiting.

    Long requests exceed an instance. Costs of eight GPUs follow the measured step from one GPU to two;
    `_today` uses a tensor parallel instance without any loss.
    """
    tp2 = find_cost("opt-13b-a100-tp2")
    found: dict[str, float] = {}
    together = 4 * _INSTANCE_TOKENS
    for percent in (1, 10, 30):
        mix = Mix(percent / 100, _INSTANCE_TOKENS, 2 * _INSTANCE_TOKENS, chat_prompt_median=2_000)
        base = Scenario(duration_s=effort.pick(1200.0, 120.0), seed=effort.seed, mix=mix)
        lent = replace(base, cost=RemoteCost(tp2))
        whole = replace(base, workers=1, kv_tokens=together, cost=RemoteCost(_eight_gpus(tp2)))
        ideal = replace(whole, cost=RemoteCost(slowed(tp2, 0.25)))
        split = replace(lent, mix=replace(mix, long_share=0.0), most_lent=0.0)
        rates = [LendingSimulation(one).run().tok_s() for one in (lent, whole, ideal, split)]
        for label, rate in zip(_FIGURE_8, rates, strict=True):
            found |= points("infinite-llm-fig8", {label: {f"{percent}% long": rate}})
        found |= {f"mixed_{percent}": rates[0] / rates[1], f"mixed_{percent}_today": rates[0] / rates[2]}
    return found


def _eight_gpus(tp2: FittedCost) -> FittedCost:
    """Return the cost on eight GPUs: each part changes twice as from one GPU to two."""
    tp1 = find_cost("opt-13b-a100")

    def grown(one: float, two: float) -> float:
        return two * min(1.0, two / one) ** 2

    prefill = (grown(a, b) for a, b in zip(tp1.prefill_ms, tp2.prefill_ms, strict=True))
    parts = [
        DecodePart(*(grown(getattr(a, name), getattr(b, name)) for name in DecodePart.__slots__))
        for a, b in ((tp1.small, tp2.small), (tp1.large, tp2.large))
    ]
    first, token, square = prefill
    return replace(tp2, prefill_ms=(first, token, square), small=parts[0], large=parts[1])


def dgfm(effort: Effort) -> Figures:
    """Compare throughput with settled cycles of debts, as in the paper, and without."""
    base = Scenario(duration_s=effort.pick(1200.0, 120.0), threshold_blocks=4, repays=False)
    ratios, drawn = [], dict[str, float]()
    for seed in range(effort.seed, effort.seed + effort.pick(2, 1)):
        on, off = (
            LendingSimulation(replace(base, seed=seed, settles=settles)).run() for settles in (True, False)
        )
        ratios.append((on.tok_s() / off.tok_s(), on.remote_share() / max(1e-9, off.remote_share())))
        for label, run in (("with DGFM", on), ("without", off)):
            drawn |= points("infinite-llm-fig10", {label: {f"seed {seed}": run.tok_s()}})
    return drawn | {
        "dgfm": fmean(rate for rate, _ in ratios),
        "dgfm_remote": fmean(share for _, share in ratios),
    }


def attention(effort: Effort) -> Figures:
    """Measure one layer, live, with keys here, at another process, and half of them there."""
    torch.set_num_threads(1)
    cores = Cores.choose()
    contexts = effort.pick([1024, 4096, 16384, 32768], [1024, 32768])
    with cores.client():
        cells = measure_cells(cores.engine, contexts, [1], effort.pick(9, 5), lambda: None)
    by_context = {cell.context_tokens: cell for cell in cells}
    ratios = {
        "half of the keys remote": {at: cell.half_ratio for at, cell in by_context.items()},
        "all keys remote": {at: 1 + cell.overhead for at, cell in by_context.items()},
    }
    times_ms = {
        "fetching": {at: cell.fetch_s * 1e3 for at, cell in by_context.items()},
        "sending queries": {at: cell.ship_s * 1e3 for at, cell in by_context.items()},
    }
    drawn = points("infinite-llm-fig11", ratios) | points("infinite-llm-fig12", times_ms)
    return drawn | {
        "remote_ratio": cells[-1].half_ratio,
        "remote_ratio_whole": 1 + cells[-1].overhead,
        "overhead_shrinks": (1 + cells[0].overhead) / (1 + cells[-1].overhead),
        "query_vs_fetch": cells[-1].fetch_ratio,
    }


STUDIES = (
    Study(
        "infinite-llm",
        "infinite-llm-contexts",
        "LLaMA2-7B, 108k tokens of KV per A100; 2 and 32 instances; simulated, live decisions",
        contexts,
        tuple(
            Claim(
                f"context_{name}",
                f"longest context on {count} instances, of one",
                "fig. 7",
                (said, said),
                turns=(("all free memory lent", f"context_{name}_all_lent"),),
            )
            for name, count, said in (("2", 2, 2), ("many", 32, 19))
        ),
        pictures=(
            Picture(
                "infinite-llm-fig7",
                "Infinite-LLM, fig. 7",
                "instances",
                "longest context, of one",
                2,
                (("2", 2), ("32", 19)),
            ),
        ),
    ),
    Study(
        "infinite-llm",
        "infinite-llm-mixed",
        "13B on 8 A100: 4 instances of 2 that lend, or one of 8; long requests exceed an instance; simulated",
        mixed,
        tuple(
            Claim(
                f"mixed_{percent}",
                f"throughput, {percent}% long requests, of tensor parallel",
                "fig. 8",
                span,
                today="no loss",
            )
            for percent, span in ((1, (1.4, 2.4)), (10, (1.1, 1.4)), (30, (1.03, 1.3)))
        ),
        pictures=(Picture("infinite-llm-fig8", "Infinite-LLM, fig. 8", "", "tokens/s"),),
    ),
    Study(
        "infinite-llm",
        "infinite-llm-dgfm",
        "four LLaMA2-13B instances of two A100, mixed contexts; simulated; the paper gives no number",
        dgfm,
        (
            Claim("dgfm", "throughput with DGFM, of without", "fig. 10", (1, 1), Rule.LEAST),
            Claim("dgfm_remote", "share of KV that is remote, of without", "fig. 10", (1, 1), Rule.MOST),
        ),
        pictures=(Picture("infinite-llm-fig10", "Infinite-LLM, fig. 10", "", "tokens/s"),),
    ),
    Study(
        "infinite-llm",
        "infinite-llm-attention",
        "one layer of Llama-3-8B, one token, another process on the other core; live on this machine",
        attention,
        (
            Claim(
                "remote_ratio",
                "time with half of the keys remote, of local",
                "fig. 11",
                (1.1, 1.1),
                Rule.MOST,
                turns=(("all keys remote", "remote_ratio_whole"),),
            ),
            Claim("overhead_shrinks", "overhead at short contexts, of long", "fig. 11", (1, 1), Rule.LEAST),
            Claim(
                "query_vs_fetch", "time of fetching keys, of sending queries", "fig. 12", (2, 2), Rule.LEAST
            ),
        ),
        pictures=(
            Picture("infinite-llm-fig11", "Infinite-LLM, fig. 11", "context", "time, of local keys", 2),
            Picture("infinite-llm-fig12", "Infinite-LLM, fig. 12", "context", "ms", 2),
        ),
    ),
)
