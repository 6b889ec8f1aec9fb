"""`python -m bench serve --peer vllm`: Poisson rate that each side sustains with little KV, live, in turns.

Four servers have one checkpoint and the same KV bytes: vLLM, ours with policy `vllm`, ours with `kvasir` and
a predictor trained on other prompts, and `kvasir` with the true lengths.
"""

import os
from argparse import ArgumentParser
from contextlib import ExitStack
from pathlib import Path

from bench.kit.context import Context, check_resumable
from bench.kit.cores import Cores
from bench.kit.outcome import Outcome
from bench.kit.plots import draw_latency
from bench.live.serve import figures
from bench.live.serve.arena import Arena
from bench.live.serve.opening import open_arena
from bench.live.serve.plan import Plan, plan_of
from bench.live.serve.sides import BASE, MECHANISMS, PEER
from bench.live.serve.turns import Turns


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--peer", choices=("vllm", "none"), help="[vllm; --quick none]")
    add("--predictor", choices=("histogram", "regressor"), help="of kvasir [regressor; --quick histogram]")
    add("--oracle", choices=("yes", "no"), help="kvasir told the lengths too [yes; --quick no]")
    add(
        "--mechanisms",
        nargs="*",
        choices=MECHANISMS,
        default=[],
        help="kvasir with these besides, a side each",
    )
    add("--workers", type=int, default=1, help="of each side; several: --peer none [%(default)s]")
    add(
        "--engines",
        action="store_true",
        help="our workers' engine is vLLM, too: what our control plane brings",
    )
    add("--prefix-tokens", type=int, default=0, help="before every prompt [none]")
    add("--prefixes", type=int, default=8, help="different ones of those [%(default)s]")
    add("--requests", type=int, help="of a cell [500; --quick 24]")
    add("--low-requests", type=int, help="of the cell at a tenth of the load [100; quick 6]")
    add(
        "--beyond-requests",
        type=int,
        help="of a cell at 1.2 times the knee: overload shows late [2000; quick 24]",
    )
    add("--lessons", type=int, help="prompts served beforehand [600; --quick 24]")
    add("--pool", type=int, help="different prompts to be measured [500; --quick 24]")
    add("--kv-requests", type=float, default=12, help="mean requests in the KV [%(default)g]")
    add("--kv-tokens", type=int, help="size of the KV, instead")
    add("--max-tokens", type=int, help="of every request [400; --quick 96]")
    add("--story-share", type=float, default=0.6, help="of the prompts [%(default)g]")
    add("--trace", type=Path, help="JSONL with prompt and response or length, instead")
    add("--tolerance", type=float, help="of the sustained rate [0.05; --quick 0.5]")
    add("--repeats", type=int, default=1, help="seeds of every rate searched [%(default)s]")
    add("--alternations", type=int, help="at 1.2 times the knee [5; --quick 1]")
    add("--price-turns", type=int, help="with --engines: bare vLLM against the policy vllm [5; --quick 1]")
    add("--slo-scale", type=float, default=2.0, help="[%(default)g]")
    add("--model", type=Path, default=Path("models/tiny_chat"), help="[%(default)s]")
    add("--budget-s", type=float, help="no cell begins that would end later [3600; --quick 20]")
    add("--resume", action="store_true", help="go on with the run in --out")


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError if the peer is not installed or a run cannot be resumed. Raises
    InternalError if a side does not start or fails in its warm-up.
    """
    plan = plan_of(context)
    check_resumable(context, {**plan.identity(), "seed": context.seed})
    cores = Cores.choose()
    with ExitStack() as running:
        running.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))  # the record lists all cores
        arena = Arena(context, cores, plan.workers)
        workload = open_arena(context, plan, arena, running)
        if plan.workers == 1:
            cores.bind_client()
        turns = Turns(context, plan, arena, workload)
        incomplete = turns.take()
    rows = turns.rows
    made = figures.figures(rows, turns.knees())
    if plan.engines:
        made |= figures.of_engines(rows, made)
    mean_tokens = sum(map(len, workload.measured)) + sum(workload.truths)
    made["kv_mean_requests"] = plan.kv_tokens * len(workload.truths) / mean_tokens
    made["answer_tokens_mean"] = sum(workload.truths) / len(workload.truths)
    made["same_length_share_min"] = min((row["same_length"] for row in rows), default=0.0)
    if (limit := figures.limit_ms(rows)) is not None:
        made["limit_ms"] = limit
        title = f"{plan.kv_tokens} tokens of KV, {plan.model.name}"
        draw_latency(context.picture("latency"), title, figures.curves(rows), limit / 1e3)
    return Outcome(
        figures=made,
        failures=sum(row["failures"] for row in rows),
        tables=[figures.table(rows)],
        notes=_notes(plan, incomplete),
        headline=figures.headline(made),
        extra={"incomplete": incomplete, "sides": {n: dict(s.describes) for n, s in arena.sides.items()}},
    )


def _notes(plan: Plan, incomplete: bool) -> list[str]:
    yardstick = PEER if plan.peer == "vllm" else BASE
    return [
        "normalized latency: mean of (end − planned arrival) / output tokens; sustained: at most "
        f"{figures.LATENCY_FACTOR:g} times that of {yardstick} at a tenth of its throughput, no failures",
        f"workers of a side: {plan.workers}; each has {plan.kv_tokens} tokens of KV",
        f"rates are {1 + plan.tolerance:g} apart; {plan.requests} requests a cell, {plan.repeats} seed(s)",
        f"service level: {plan.slo_scale:g} × (t_p + t_g × true length), both of {yardstick} at low load",
        "sustained_rate_ratio = engine_factor × policy_factor_oracle × prediction_factor",
        *(["not everything fitted into --budget-s: --resume --out DIR goes on"] if incomplete else []),
    ]
