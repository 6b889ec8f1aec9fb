"""Claims of Pie (papers/004 §5): swapping behind the computation of a GH200, simulated."""

from argparse import Namespace
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.kit.context import Context
from bench.kit.datasets import data_folder
from bench.live.pie import bench as live
from bench.papers.claims import TODAY, Claim, Effort, Figures, Picture, Rule, Study, points
from bench.simulated import pie
from bench.simulated.pie import ENOUGH_GB, MODELS, Question, answer, fixed_lengths, requests_of
from services.worker.core.costs import find_cost
from services.worker.pie.core.sizes import expansion
from sim.pie.cost import GH200, Interconnect
from sim.requests import SimRequest
from sim.sweep import sweep
from sim.workloads import find_source

_PCIE = Interconnect(25e9, 25e9, "PCIe 4.0 x16")
_LEAST_GB = 3.0
"""Smallest KV memory of the paper's figure 7."""
_WEIGHT_BYTES, _HOST_BYTES = 60e9, 480e9
"""OPT-30B in 16 bits, and the host memory."""
_SLOW_STEPS = "steps of 100 ms or more, as where they cost their weights"
_BATCHES, _BLOCKS, _PROFILED = (32, 64, 128, 256), (1, 3, 8, 12, 24), (162, 512)
"""Sequences of a batch and batches of a block that FlexGen's profile has, and its longest lengths (§5.7)."""


def _peer(model: str, trace: str, effort: Effort) -> Question:
    """Return the peer with enough memory, at the rate that it then reaches, as in figure 7."""
    count = effort.pick(800, 100) * (4 if trace == "alpaca" else 1)
    base = Question(model, find_source(trace, data_folder()), ENOUGH_GB, 1e6, 0, count, effort.seed)
    return replace(base, rate_per_s=answer(base).requests_per_s)


def gains(effort: Effort) -> Figures:
    """Compare Pie with vLLM on the same little memory, over both links."""
    found: dict[str, float] = {}
    for model, trace in effort.pick(
        (("opt-30b", "sharegpt"), ("opt-30b", "alpaca")), (("opt-30b", "sharegpt"),)
    ):
        short = replace(_peer(model, trace, effort), device_gb=_LEAST_GB)
        ours = replace(short, fifo_layers=None)
        sides = [short, ours, replace(short, policy="kvasir"), replace(ours, link=_PCIE)]
        enough = [replace(one, device_gb=ENOUGH_GB) for one in (short, ours)]
        plain, swapped, today, narrow, *ample = sweep(answer, sides + enough)
        found |= {
            f"gain_{trace}": swapped.tokens_per_s / plain.tokens_per_s,
            f"gain_{trace}_today": swapped.tokens_per_s / max(plain.tokens_per_s, today.tokens_per_s),
            f"latency_{trace}": plain.normalized_s / swapped.normalized_s,
            f"latency_{trace}_today": min(plain.normalized_s, today.normalized_s) / swapped.normalized_s,
            f"pcie_{trace}": narrow.tokens_per_s / plain.tokens_per_s,
            f"stalls_{trace}": 1 + swapped.stall_share,
            f"enough_{trace}": ample[1].tokens_per_s / ample[0].tokens_per_s,
        }
        layers = MODELS[model].layers
        grown = {round(at_s, 3): expansion(layers, length) for at_s, length in swapped.lengths}
        found |= points("pie-fig9", {trace: grown})
    return found


def memory(effort: Effort) -> Figures:
    """Find the memory that vLLM needs for Pie's throughput, and Pie's distance from the best fixed queue."""
    peer = _peer("opt-13b", "sharegpt", effort)
    sizes = effort.pick((3.0, 5.0, 7.0, 9.0, 12.0, 15.0, 20.0), (3.0, 6.0, 12.0))
    few = sizes[: effort.pick(5, 2)]
    lengths = fixed_lengths(MODELS["opt-13b"])[:: effort.pick(1, 3)]
    sides = [(gb, 0) for gb in sizes] + [(gb, None) for gb in few] + [(few[0], f) for f in lengths]
    answers = sweep(answer, [replace(peer, device_gb=gb, fifo_layers=layers) for gb, layers in sides])
    plain, swapped, fixed = answers[: len(sizes)], answers[len(sizes) :][: len(few)], answers[-len(lengths) :]
    peers = {gb: one.tokens_per_s for gb, one in zip(sizes, plain, strict=True)}
    ours = {gb: one.tokens_per_s for gb, one in zip(few, swapped, strict=True)}
    layers = MODELS["opt-13b"].layers
    by_expansion = {
        expansion(layers, length): one.tokens_per_s for length, one in zip(lengths, fixed, strict=True)
    }
    drawn = points("pie-fig7", {"vLLM": peers, "Pie": ours})
    drawn |= points("pie-fig6", {"OPT-13B": {1.0: plain[0].tokens_per_s, **by_expansion}})
    return drawn | {
        "saved": pie.memory_saving(peers, ours),
        "best_fixed_gain": max(one.tokens_per_s for one in fixed) / plain[0].tokens_per_s,
        "adaptive_vs_fixed": swapped[0].tokens_per_s / max(one.tokens_per_s for one in (*fixed, plain[0])),
    }


def flexgen(effort: Effort) -> Figures:
    """Compare Pie with FlexGen's policy: the best of the paper's batches, all padded to the longest."""
    found: dict[str, float] = {}
    rates: dict[str, dict[str, float]] = {}
    for trace in effort.pick(("sharegpt", "alpaca"), ("sharegpt",)):
        question = replace(_peer("opt-30b", trace, effort), device_gb=_LEAST_GB, fifo_layers=None)
        ours, requests = answer(question), requests_of(question)
        lengths = [(one.prompt_tokens, one.output_tokens) for one in requests]
        longest = (max(prompt for prompt, _ in lengths), max(output for _, output in lengths))
        tokens_per_s, normalized_s = _flexgen(requests, longest)
        rates[trace] = {"Pie": ours.tokens_per_s, "FlexGen": tokens_per_s}
        found |= {
            f"flexgen_{trace}": ours.tokens_per_s / tokens_per_s,
            f"flexgen_latency_{trace}": normalized_s / ours.normalized_s,
        }
        if trace == "sharegpt":
            found["flexgen_cut"] = ours.tokens_per_s / _flexgen(requests, _PROFILED)[0]
    return points("pie-fig10", rates) | found


def _flexgen(requests: list[SimRequest], padded: tuple[int, int]) -> tuple[float, float]:
    """Return the most tokens per second of any block of batches that fits into host memory, and its seconds
    per token, waits included. All prompts and answers have `padded` tokens; longer answers are cut.

    Weights come once a step for all batches of a block, KV for each; nothing is copied beside computation.
    """
    cost, model, (prompt, most) = find_cost("opt-30b-h100"), MODELS["opt-30b"], padded
    token_bytes, best = model.layers * model.token_layer_bytes, (0.0, 0.0)
    fits = (_HOST_BYTES - _WEIGHT_BYTES) / (token_bytes * (prompt + most))
    for batch, batches in product(_BATCHES, _BLOCKS):
        if (size := batch * batches) > fits:
            continue
        contexts = [batch * (prompt + made) for made in range(1, most)]
        computed_s = cost.step_s([(0, prompt)] * batch, 0, 0)
        computed_s += sum(cost.step_s([], batch, context) for context in contexts)
        copied_s = (most * _WEIGHT_BYTES + batches * token_bytes * sum(contexts)) / GH200.to_device
        end_s = tokens = waited_s = 0.0
        for first in range(0, len(requests), size):
            block = requests[first : first + size]
            end_s = max(end_s, block[-1].arrival_s) + batches * computed_s + copied_s
            cut = [min(most, one.output_tokens) for one in block]
            waited_s += sum((end_s - one.arrival_s) / made for one, made in zip(block, cut, strict=True))
            tokens += sum(cut)
        best = max(best, (tokens / end_s, waited_s / len(requests)))
    return best


def served(effort: Effort) -> Figures:
    """Serve on real engines with KV for five requests and 48 clients, with Pie and without."""
    found: dict[str, float] = {}
    for suffix, step_ms, turns in (("", 0.0, 4), ("_100", 100.0, 2)):
        with TemporaryDirectory() as folder:
            flags = Namespace(part=["room"], model=None, fits=5, bandwidth=3e9, step_ms=step_ms)
            flags.clients, flags.turns, flags.lengths = 48, turns, [14]
            made = live.run(Context("pie", effort.quick, effort.seed, Path(folder), flags)).figures
        found |= {
            f"live_gain{suffix}": made["throughput_vs_recompute"],
            f"live_gain{suffix}{TODAY}": made["throughput_vs_none"],
            f"live_latency{suffix}": 1 / made["latency_vs_none"],
        }
    return found


def figure4(effort: Effort) -> Figures:
    """Run the paper's example of nine layers."""
    return {f"fig4_{name}": pie.figure4()[f"fig4_{name}"] for name in ("expansion", "stalls")}


_KVASIR = "vLLM, kvasir"
STUDIES = (
    Study(
        "pie",
        "pie-gains",
        "OPT-30B, 3 GB of KV, H100 kernels, GH200's link, rate of enough memory; simulated",
        gains,
        (
            Claim("gain_sharegpt", "throughput on ShareGPT, of vLLM's", "fig. 7", (1.9, 1.9), today=_KVASIR),
            Claim("latency_sharegpt", "vLLM's time per token, of Pie's", "abstract", (2, 2), today=_KVASIR),
            Claim("stalls_sharegpt", "step time with copies, of without", "§5.5", (1.02, 1.02), Rule.MOST),
            Claim("enough_sharegpt", "throughput with 12 GB, of vLLM's", "fig. 7", (1, 1), Rule.LEAST),
        ),
        pictures=(Picture("pie-fig9", "Pie, fig. 9", "s", "expansion"),),
    ),
    Study(
        "pie",
        "pie-memory",
        "OPT-13B on ShareGPT, 3 to 20 GB of KV; simulated",
        memory,
        (
            Claim("saved", "vLLM's memory for the same throughput, of Pie's", "§5.2", (1.67, 1.67)),
            Claim("best_fixed_gain", "throughput of the best expansion, of none", "fig. 6", (1.54, 1.54)),
            Claim("adaptive_vs_fixed", "adaptive throughput, of best", "fig. 9", (0.98, 0.98), Rule.LEAST),
        ),
        pictures=(
            Picture("pie-fig6", "Pie, fig. 6", "expansion", "tokens/s"),
            Picture("pie-fig7", "Pie, fig. 7", "GB of KV on the device", "tokens/s"),
        ),
    ),
    Study(
        "pie",
        "pie-flexgen",
        "OPT-30B; FlexGen: the best of profiled batches, padded to the longest; simulated",
        flexgen,
        (
            Claim("flexgen_sharegpt", "throughput on ShareGPT, of FlexGen's", "fig. 10", (9.4, 9.4)),
            Claim("flexgen_cut", "same, padded to 162 and 512 tokens, longer cut", "§5.7", (9.4, 9.4)),
            Claim("flexgen_alpaca", "throughput on Alpaca, of FlexGen's", "fig. 10", (7.8, 7.8)),
            Claim("flexgen_latency_sharegpt", "FlexGen's time per token, of Pie's", "§1", (60, 60)),
        ),
        pictures=(Picture("pie-fig10", "Pie, fig. 10", "", "tokens/s"),),
    ),
    Study(
        "pie",
        "pie-served",
        "random-50m of 16 layers, KV for five requests, a link of 3 GB/s; live on this machine",
        served,
        (
            Claim(
                "live_gain",
                "throughput, of recomputing's",
                "fig. 7",
                (1.9, 1.9),
                today="better of recompute and swap",
                turns=((_SLOW_STEPS, "live_gain_100"),),
            ),
            Claim(
                "live_latency",
                "latency of the better of both, of Pie's",
                "abstract",
                (2, 2),
                turns=((_SLOW_STEPS, "live_latency_100"),),
            ),
        ),
        has_quick=False,
    ),
    Study(
        "pie",
        "pie-figure4",
        "nine layers, swaps that take two layers' time",
        figure4,
        (
            Claim("fig4_expansion", "expansion with seven slots", "fig. 4", (9 / 7, 9 / 7)),
            Claim("fig4_stalls", "stalls with seven slots", "fig. 4", (0, 0), Rule.MOST),
        ),
    ),
)
