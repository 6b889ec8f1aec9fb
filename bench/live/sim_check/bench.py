"""`python -m bench sim-check`: error of the simulator against live runs on this machine.

Live workers use policy `vllm` and Tiny Chat, without swapping, lending or migration, which are not simulated.
Their throughput is measured first; that load and two more give the costs (`costs.py`).
"""

import os
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.kit.context import Context
from bench.kit.outcome import Outcome, Table
from bench.kit.stacks import OFF, start_stack
from bench.live.sim_check import loads
from bench.live.sim_check.costs import BLOCK_TOKENS, MAX_STEPS, TOKEN_BUDGET, Costs, figures, learn, replay
from bench.live.sim_check.loads import Load, Seen, Setting
from shared.errors import ConfigError
from sim.sweep import cores

LESSONS = (35, 65)
"""Loads for the costs, in percent of the throughput."""
_ALL_AT_ONCE = 1e6


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--policy", default="vllm", help="[%(default)s]")
    add("--workers", type=int, default=1, help="live, and simulated [%(default)s]")
    add("--requests", type=int, help="of each run [500, quick: 60]")
    add(
        "--shares",
        type=int,
        nargs="+",
        help="loads that are predicted, in %% of the throughput [20 50 80, quick: 50]",
    )
    add("--kv-blocks", type=int, default=256, help=f"of {BLOCK_TOKENS} tokens [%(default)s]")
    add("--sequences", type=int, default=32, help="in one batch [%(default)s]")
    add("--max-tokens", type=int, default=256, help="of every request [%(default)s]")
    add("--loads", type=Path, help=f"replay the {loads.FILE} of an earlier run; nothing is measured")


def run(context: Context) -> Outcome:
    """Run the bench. Raises InternalError if the stack does not start or no answer succeeds, ConfigError
    for a file without loads."""
    if context.arguments.loads is not None:
        setting, measured = loads.kept(context.arguments.loads)
    else:
        setting, measured = _measured(context)
        loads.keep(context, setting, measured)
    lessons = [load for load in measured if load.kind == "lesson"]
    predicted = {load.percent: load for load in measured if load.kind == "predicted"}
    if not lessons or not predicted:
        raise ConfigError("costs need a lesson, and errors a load to predict", param="loads")
    costs = learn(lessons, setting, [load for load in measured if load.kind == "whole"])
    found = {percent: replay(load, costs, setting) for percent, load in predicted.items()}
    for percent, answers in found.items():
        _record(context, percent, predicted[percent].answers, answers)
    return _outcome(measured, predicted, found, costs)


def _measured(context: Context) -> tuple[Setting, list[Load]]:
    flags = context.arguments
    count = flags.requests or (60 if context.quick else 500)
    shares = flags.shares or ([50] if context.quick else [20, 50, 80])
    setting = Setting(
        flags.workers, flags.kv_blocks, flags.sequences, flags.policy, flags.max_tokens, cores()
    )
    context.say(f"starting a stack with {setting.workers} workers")
    folder = context.run_dir.resolve() / "stack"
    with start_stack(folder, _settings(setting), workers=setting.workers) as stack:
        seeds = iter(range(context.seed + 1, context.seed + 1000))

        def load(kind: str, percent: int, requests: int, rate: float) -> Load:
            return loads.measure(stack, kind, percent, requests, rate, next(seeds), setting.max_tokens)

        context.say("warming up, and the throughput of all at once")
        load("warm-up", 0, 8, 8.0)
        whole = load("whole", 100, count, _ALL_AT_ONCE)
        rate = len(whole.answers) / whole.span_s
        measured = [whole]
        for kind, percents in (("lesson", LESSONS), ("predicted", shares)):
            for percent in percents:
                context.say(f"{count} requests at {percent / 100 * rate:.1f}/s: {kind}")
                measured.append(load(kind, percent, count, percent / 100 * rate))
    return setting, measured


def _settings(setting: Setting) -> dict[str, object]:
    return {
        **OFF,
        "worker.threads": 1,
        "worker.kv_blocks": setting.kv_blocks,
        "worker.block_tokens": BLOCK_TOKENS,
        "placement.policy": "worst_fit",
        "scheduler.policy": setting.policy,
        "scheduler.max_batch_sequences": setting.sequences,
        "scheduler.token_budget": TOKEN_BUDGET,
        "scheduler.max_steps": MAX_STEPS,
    }


def _record(context: Context, percent: int, live: Sequence[Seen], made: Sequence[Seen]) -> None:
    for one, other in zip(live, made, strict=True):
        context.record(
            {
                "share": percent,
                "arrival_s": one.sent_s,
                "prompt_tokens": one.prompt_tokens,
                "output_tokens": one.output_tokens,
                "live_ttft_s": one.first_s,
                "simulated_ttft_s": other.first_s,
                "live_jct_s": one.whole_s,
                "simulated_jct_s": other.whole_s,
            }
        )


def _outcome(
    measured: Sequence[Load], predicted: Mapping[int, Load], found: Mapping[int, Sequence[Seen]], costs: Costs
) -> Outcome:
    """Return `NAME_error_PERCENT`: simulated / live - 1."""
    told: dict[str, float] = {}
    rows: list[tuple[object, ...]] = []
    for percent, load in predicted.items():
        live, made = figures(load.answers), figures(found[percent])
        for name in live:
            error = told[f"{name}_error_{percent}"] = made[name] / live[name] - 1
            rows.append((f"{percent} %", name, f"{live[name]:.4g}", f"{made[name]:.4g}", f"{error:+.1%}"))
    whole = next((load for load in measured if load.kind == "whole"), None)
    if whole is not None:
        told["requests_per_s"] = len(whole.answers) / whole.span_s
    told |= {
        "step_fixed_ms": 1e3 * costs.step.fixed_s,
        "step_prefill_token_ms": 1e3 * costs.step.prefill_token_s,
        "step_sequence_ms": 1e3 * costs.step.sequence_s,
        "step_context_us": 1e6 * costs.step.context_s,
        "step_ratio_p99": costs.rest.ratios[int(0.99 * len(costs.rest.ratios))],
        "request_overhead_ms": 1e3 * costs.overhead_s,
        "rest_step_ms": 1e3 * costs.rest.frame_s,
        "rest_token_ms": 1e3 * costs.rest.token_s,
        "rest_lanes": costs.rest.lanes,
    }
    notes = [
        "errors are simulated / live - 1; costs come from runs of their own",
        f"cores: {costs.rest.cores} of {os.cpu_count()}; the noise of the predicted runs is in the error",
    ]
    table = Table("live and simulated", ("load", "figure", "live", "simulated", "error"), rows)
    return Outcome(told, sum(load.failures for load in measured), [table], notes)
