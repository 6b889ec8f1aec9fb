"""Claims of Pie (papers/004 §5): swapping behind the computation of a GH200, simulated."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.kit.context import Context
from bench.kit.datasets import data_folder
from bench.live.pie import bench as live
from bench.papers.claims import Claim, Effort, Figures, Picture, Rule, Study, points
from bench.simulated import pie
from bench.simulated.pie import ENOUGH_GB, MODELS, Question, answer, fixed_lengths, requests_of
from services.scheduler.policy.contract import PolicySettings, WorkerShape
from services.worker.core.costs import find_cost
from services.worker.core.costs.fitted import DecodePart
from services.worker.pie.core.sizes import expansion
from sim.pie.cost import GH200, Interconnect
from sim.predictors import find_predictor
from sim.setup import Setup
from sim.simulation import Simulation
from sim.summary import summarize
from sim.sweep import sweep
from sim.workloads import find_source

_PCIE = Interconnect(25e9, 25e9, "PCIe 4.0 x16")
_LEAST_GB = 3.0
"""Smallest KV memory of the paper's figure 7."""
_WEIGHT_BYTES, _HOST_BYTES = 60e9, 200e9
"""OPT-30B in 16 bits, and the host memory that FlexGen's policy gives to KV."""
_FLEXGEN_BATCH = 256


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
        asked = [short, ours, replace(short, policy="kvasir"), replace(ours, link=_PCIE)]
        if trace == "sharegpt":
            asked.append(replace(ours, device_gb=ENOUGH_GB))
            asked.append(replace(short, device_gb=ENOUGH_GB))
        plain, swapped, today, narrow, *enough = sweep(answer, asked)
        found |= {
            f"gain_{trace}": swapped.tokens_per_s / plain.tokens_per_s,
            f"gain_{trace}_today": swapped.tokens_per_s / max(plain.tokens_per_s, today.tokens_per_s),
            f"latency_{trace}": plain.normalized_s / swapped.normalized_s,
            f"latency_{trace}_today": min(plain.normalized_s, today.normalized_s) / swapped.normalized_s,
            f"pcie_{trace}": narrow.tokens_per_s / plain.tokens_per_s,
            f"stalls_{trace}": 1 + swapped.stall_share,
        }
        if enough:
            found["enough"] = enough[0].tokens_per_s / enough[1].tokens_per_s
            layers = MODELS[model].layers
            grown = {round(at_s, 3): expansion(layers, length) for at_s, length in swapped.lengths}
            found |= points("pie-fig9", {"Pie": grown})
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
    """Compare Pie with FlexGen's policy: weights and KV on the host, fetched on demand before each layer, and
    memory for the longest sequence."""
    ours = replace(_peer("opt-30b", "sharegpt", effort), device_gb=_LEAST_GB, fifo_layers=None)
    base, model = find_cost("opt-30b-h100"), MODELS["opt-30b"]
    token_ms = 1e3 * model.layers * model.token_layer_bytes / GH200.to_device
    copied_ms = 1e3 * _WEIGHT_BYTES / GH200.to_device
    part = base.small
    part = DecodePart(part.fixed_ms + copied_ms, part.context_ms + token_ms, part.sequence_ms)
    first, token, square = base.prefill_ms
    cost = replace(base, prefill_ms=(first + copied_ms, token, square), small=part, large=part)
    settings = PolicySettings(
        max_batch_sequences=_FLEXGEN_BATCH, token_budget=1 << 20, chunked_prefill=False, start_tokens=1 << 30
    )
    shape = WorkerShape(16, model.capacity_blocks(_HOST_BYTES, 16))
    setup = Setup("orca", shape, settings, cost, find_predictor("none", seed=0, train=[]))
    theirs = summarize(Simulation(setup, requests_of(ours)).run())
    found = answer(ours)
    rates = {"Pie": found.tokens_per_s, "FlexGen": theirs["tokens_per_s"]}
    return points("pie-fig10", {"OPT-30B": rates}) | {
        "flexgen": found.tokens_per_s / theirs["tokens_per_s"],
        "flexgen_latency": theirs["normalized_s"] / found.normalized_s,
    }


def served(effort: Effort) -> Figures:
    """Serve on real engines with KV for eight requests and 48 clients, with Pie and without."""
    with TemporaryDirectory() as folder:
        flags = Namespace(part=["room"], model=None, trace=None, fits=8, bandwidth=3e9)
        flags.clients, flags.turns, flags.lengths = 48, 4, [14]
        found = live.run(Context("pie", effort.quick, effort.seed, Path(folder), flags)).figures
    return {"live_gain": found["throughput_vs_none"], "live_latency": 1 / found["latency_vs_none"]}


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
            Claim("enough", "throughput with 12 GB, of vLLM's", "fig. 7", (1, 1), Rule.LEAST),
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
        "OPT-30B on ShareGPT; FlexGen: batches of 256, weights and KV fetched on demand; simulated",
        flexgen,
        (Claim("flexgen", "throughput, of FlexGen's", "fig. 10", (9.4, 9.4)),),
        pictures=(Picture("pie-fig10", "Pie, fig. 10", "", "tokens/s"),),
    ),
    Study(
        "pie",
        "pie-served",
        "random-50m of 16 layers, a link of 3 GB/s; against the better of recompute and swap; live here",
        served,
        (
            Claim("live_gain", "throughput, of no Pie's", "fig. 7", (1.9, 1.9)),
            Claim("live_latency", "latency without Pie, of with", "abstract", (2, 2)),
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
