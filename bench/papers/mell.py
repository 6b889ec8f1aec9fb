"""Claims of MELL (papers/000 §III, §VII and §VIII): long conversations placed on simulated GPUs."""

from collections.abc import Callable, Sequence
from random import Random

from bench.kit.datasets import data_folder
from bench.papers.claims import Claim, Effort, Figures, Picture, Rule, Study, points
from bench.simulated.placement import replay
from bench.simulated.placement.jobs import A100, RTX4090, Hardware, Job, Workload, make_jobs
from bench.simulated.placement.measures import PackingCell, figures_of
from bench.simulated.placement.replay import (
    BALANCE,
    BALANCE_LAZY,
    BEST_FIT,
    BEST_FIT_RESERVE,
    EAGER_SIDE,
    MELL,
    MELL_BY_OPERATION,
    WORST_FIT,
    Tally,
)
from services.placement.core.move_mode import Migration, divide

_SIDES = (MELL, EAGER_SIDE, BEST_FIT, BEST_FIT_RESERVE, WORST_FIT, BALANCE, BALANCE_LAZY)
_KV_BYTES, _LINK_BYTES, _PREFILL_TOKENS, _GPUS = 819_200, 1_250_000_000, 3_500, 4
"""LLaMA-13B's KV of a token, and what a link of 10 Gbit/s carries and an idle half of an A100 computes in an
epoch of one second."""


def _jobs(rate: float | None, duration_s: float, effort: Effort, machine: Hardware = A100) -> list[Job]:
    workload = Workload("papers", "", rate, duration_s)
    return make_jobs(workload, machine, data=data_folder(), source=None, seed=effort.seed)[0]


def packing(effort: Effort) -> Figures:
    """Replay every side on the paper's arrivals, in epochs."""
    duration_s, warm_s = effort.pick((900.0, 300.0), (420.0, 240.0))
    cells = []
    for machine in effort.pick((A100, RTX4090), (RTX4090,)):
        for rate in effort.pick((0.5, 0.8, 1.1, None), (0.5, 0.8)):
            jobs = _jobs(rate, duration_s, effort, machine)
            cell = PackingCell(f"{rate or 'azure'} {machine.name}", "", len(jobs), 0)
            cell.tallies = {side.label: side.run(jobs, machine, warm_s) for side in _SIDES}
            cells.append(cell)
    found = figures_of(cells)
    shares = {
        side: sum(cell.tallies[side.label].used_share / cell.tallies[side.label].epochs for cell in cells)
        for side in (MELL, WORST_FIT, BALANCE_LAZY)
    }
    return {
        "gpus_vs_bf": found["gpus_vs_bf"],
        "gpus_vs_bf_reserve": found["gpus_vs_bf_reserve"],
        "gpus_vs_wf": found["gpus_vs_wf"],
        "gpus_vs_lb": found["gpus_vs_lb"],
        **{f"gpus_vs_{rival}_today": found["gpus_vs_lb_lazy"] for rival in ("bf", "wf", "lb")},
        "use": found["utilization"],
        "use_vs_wf": shares[MELL] / shares[WORST_FIT],
        "use_vs_wf_today": shares[MELL] / shares[BALANCE_LAZY],
        "moves_vs_lb": found["migrations_vs_lb"],
        "moves_vs_lb_today": found["migrations_vs_lb_lazy"],
        "bound": found["worst_ratio"],
    } | _drawn(cells)


def _drawn(cells: Sequence[PackingCell]) -> dict[str, float]:
    values: dict[str, Callable[[Tally], float]] = {
        "mell-fig11": lambda tally: tally.mean_gpus(),
        "mell-fig12": lambda tally: (tally.moves - tally.recomputes) / tally.seconds,
        "mell-fig14": lambda tally: tally.used_share / tally.epochs,
    }
    found: dict[str, float] = {}
    for name, value in values.items():
        by_side = {
            side.label: {cell.name: value(cell.tallies[side.label]) for cell in cells} for side in _SIDES
        }
        found |= points(name, by_side)
    often = [cell for cell in cells if "azure" not in cell.name][-1]
    return found | points("mell-fig15", {side: dict(one.timeline) for side, one in often.tallies.items()})


def batching(effort: Effort) -> Figures:
    """Replay MELL with the operations of an epoch batched, and one by one."""
    rate, duration_s, warm_s = effort.pick((0.8, 900.0, 300.0), (0.5, 320.0, 200.0))
    jobs = _jobs(rate, duration_s, effort, RTX4090)
    batched, single = (side.run(jobs, RTX4090, warm_s) for side in (MELL, MELL_BY_OPERATION))
    rates = {"batched": batched.moves / batched.seconds, "one by one": single.moves / single.seconds}
    return points("mell-fig13", {"MELL": rates}) | {
        "batching": batched.moves / single.moves,
        "moves_most": float(single.moves_max),
    }


def serving(effort: Effort) -> Figures:
    """Count requests that keep their KV on a fixed number of GPUs, at 1, 1.2 and 1.5 times their capacity."""
    jobs = _jobs(0.8, effort.pick(900.0, 600.0), effort)
    tally = MELL.run(jobs, A100, 60.0)
    found = replay.measure(jobs, A100, tally.volume / tally.epochs)
    gains = replay.figures(found)
    served = {(one.policy, f"{one.load:g}"): one.served for one in found}
    curves = {
        policy: {one.load: one.ratio for one in found if one.policy == policy}
        for policy in dict.fromkeys(one.policy for one in found)
    }
    return points("mell-fig6", curves) | {
        name: value
        for load in ("1", "1.2", "1.5")
        for name, value in (
            (f"served_{load}", gains[f"served_gain_{load}"]),
            (f"served_{load}_bf", served["mell", load] / max(1, served["best_fit", load])),
        )
    }


def modes(effort: Effort) -> Figures:
    """Count the moves of random epochs that fit the budgets of links and targets, by choice of mode."""
    draw, sizes = Random(effort.seed), [job.prompt_tokens for job in _jobs(0.8, 300.0, effort)]
    pairs = [(f"g{a}", f"g{b}") for a in range(_GPUS) for b in range(_GPUS) if a != b]
    links, targets = dict.fromkeys(pairs, _LINK_BYTES), {f"g{at}": _PREFILL_TOKENS for at in range(_GPUS)}
    fits = {"adaptive": 0, "kv": 0, "tokens": 0}
    for _ in range(200):
        chosen = [(draw.choice(pairs), max(1, draw.choice(sizes))) for _ in range(12)]
        moves = [
            Migration(str(at), *pair, kv_bytes=tokens * _KV_BYTES, tokens=tokens)
            for at, (pair, tokens) in enumerate(chosen)
        ]
        budgets = {"adaptive": (links, targets), "kv": (links, {}), "tokens": ({}, targets)}
        for choice, budget in budgets.items():
            fits[choice] += sum(mode is not None for mode in divide(moves, *budget).values())
    return {f"adaptive_vs_{alone}": fits["adaptive"] / fits[alone] for alone in ("kv", "tokens")}


_BF = "best fit as the rival"
_LAZY = "lazy balancing"
_RESERVE = (("room reserved for the longest answer", "gpus_vs_bf_reserve"),)
STUDIES = (
    Study(
        "mell",
        "mell-packing",
        "ten times longer conversations, λ = 0.5 to 1.1 and Azure, LLaMA-13B on A100-40G, 7B on 24 GB",
        packing,
        (
            Claim("gpus_vs_bf", "GPUs, of best fit's", "abstract", (0.91, 0.69), today=_LAZY, turns=_RESERVE),
            Claim("gpus_vs_wf", "GPUs, of worst fit's", "fig. 11", (0.80, 0.69), today=_LAZY, turns=_RESERVE),
            Claim("gpus_vs_lb", "GPUs, of load balancing's", "fig. 11", (0.85, 0.85), today=_LAZY),
            Claim("use", "GPU memory in use", "fig. 14", (0.88, 0.88), Rule.LEAST),
            Claim("use_vs_wf", "memory in use, of worst fit's", "abstract", (1.10, 1.43), today=_LAZY),
            Claim(
                "moves_vs_lb", "migrations, of load balancing's", "fig. 12", (1, 1), Rule.MOST, today=_LAZY
            ),
            Claim("bound", "competitive ratio", "theorem 2", (4 / 3, 4 / 3), Rule.MOST),
        ),
        pictures=(
            Picture("mell-fig11", "MELL, fig. 11", "", "GPUs, mean"),
            Picture("mell-fig12", "MELL, fig. 12", "", "migrations per s"),
            Picture("mell-fig14", "MELL, fig. 14", "", "share of GPU memory in use"),
            Picture("mell-fig15", "MELL, fig. 15", "s", "GPUs", marks=False),
        ),
    ),
    Study(
        "mell",
        "mell-batching",
        "LLaMA-7B on 24 GB, Poisson arrivals",
        batching,
        (
            Claim("batching", "migrations with batching, of without", "fig. 13", (0.7, 0.7)),
            Claim("moves_most", "migrations of one operation", "theorem 3", (10, 10), Rule.MOST),
        ),
        pictures=(Picture("mell-fig13", "MELL, fig. 13", "", "migrations per s"),),
    ),
    Study(
        "mell",
        "mell-serving",
        "a fixed number of GPUs at 1, 1.2 and 1.5 times their capacity",
        serving,
        tuple(
            Claim(
                f"served_{load}",
                f"served at load {load}, of no migration",
                "fig. 6",
                (1.23, 1.6),
                turns=((_BF, f"served_{load}_bf"),),
            )
            for load in ("1", "1.2", "1.5")
        ),
        pictures=(
            Picture(
                "mell-fig6", "MELL, fig. 6", "load, of the GPUs' capacity", "requests that keep their KV"
            ),
        ),
    ),
    Study(
        "mell",
        "mell-modes",
        "12 moves an epoch between four A100, links of 10 Gbit/s; the paper gives no number",
        modes,
        (
            Claim("adaptive_vs_kv", "moves that fit an epoch, of KV alone", "§V", (1, 1), Rule.LEAST),
            Claim("adaptive_vs_tokens", "moves that fit an epoch, of tokens alone", "§V", (1, 1), Rule.LEAST),
        ),
    ),
)
