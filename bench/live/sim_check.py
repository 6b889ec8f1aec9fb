"""`python -m bench sim-check`: live runs replayed in the simulator, and how far off that is.

On live workers (`vllm` policy, Tiny Chat) the throughput is measured first, then two loads give the costs:
of a step (tokens, sequences, contexts), what the gateway and the bus add to a request, and what everything
but the engines takes of the cores for each request and token. Loads in between and beyond are predicted:
different prompts, seeds and rates. Of those the simulator is given what any trace has: arrival times, prompt
and answer lengths.

**Shares of the cores.** Where engines and the rest want more than there is, each gets its share: steps take
as much longer. What the rest adds to a request waits in a queue of its own: it takes 1 / (1 - use) times as
long as on an idle machine, `use` being the rest's share of what the engines leave.
"""

import os
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bench.kit.context import Context
from bench.kit.outcome import Outcome, Table
from bench.kit.stacks import Stack, start_stack
from bench.kit.stats import percentile
from bench.live.chats import LiveRun, chat_bodies, run_load
from services.scheduler.policy.contract import PolicySettings, WorkerShape
from services.worker.core.costs.linear import LinearCost, MeasuredStep, fit_linear
from shared.errors import InternalError
from shared.messages.plans import WorkerStepped
from sim.predictors import NoPredictor
from sim.requests import ServedRecord, SimRequest
from sim.routers import find_router
from sim.simulation import Setup, Simulation
from sim.sweep import cores

BLOCK_TOKENS = 16
MAX_STEPS = 8
TOKEN_BUDGET = 512
LESSONS = (0.35, 0.65)
"""Loads that the costs come from, in shares of the throughput."""
_LONGEST_GAP_S = 0.02
"""Between two steps of a busy worker; more is idleness."""
_MOST_USE = 0.9
_ALL_AT_ONCE = 1e6
_FITS = 4
FIGURES = ("throughput", "ttft_p50", "ttft_p99", "latency_p50", "latency_p99", "normalized")


@dataclass(frozen=True)
class Load:
    """One live run, and what it took of the cores."""

    run: LiveRun
    span_s: float
    engine_s: float
    """CPU time of all engines."""
    rest_s: float
    """Of everything else, this client included."""

    @property
    def tokens(self) -> int:
        return sum(self.run.answers[index].completion_tokens for index in _answered(self.run))


@dataclass(frozen=True)
class Costs:
    """What the simulator has to know of this machine."""

    step: LinearCost
    overhead_s: float
    """Of a first token, on an idle machine: gateway, bus, client."""
    request_s: float
    token_s: float
    """CPU time of everything but the engines."""
    cores: int


@dataclass(frozen=True)
class Setting:
    """Of the stack, live and simulated."""

    workers: int
    kv_blocks: int
    sequences: int
    policy: str


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--policy", default="vllm", help="[%(default)s]")
    parser.add_argument("--workers", type=int, default=1, help="live, and simulated [%(default)s]")
    parser.add_argument("--requests", type=int, help="of each run [500, quick: 60]")
    parser.add_argument(
        "--shares",
        type=int,
        nargs="+",
        help="loads that are predicted, in %% of the throughput [20 50 80, quick: 50]",
    )
    parser.add_argument("--kv-blocks", type=int, default=256, help=f"of {BLOCK_TOKENS} tokens [%(default)s]")
    parser.add_argument("--sequences", type=int, default=32, help="in one batch [%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=256, help="of every request [%(default)s]")


def run(context: Context) -> Outcome:
    """Raises InternalError when the stack does not start or answers fail to the last."""
    flags = context.arguments
    count = flags.requests or (60 if context.quick else 500)
    shares = flags.shares or ([50] if context.quick else [20, 50, 80])
    setting = Setting(flags.workers, flags.kv_blocks, flags.sequences, flags.policy)
    context.say(f"starting a stack with {setting.workers} workers")
    folder = context.run_dir.resolve() / "stack"
    with start_stack(folder, _settings(setting), workers=setting.workers) as stack:
        seeds = iter(range(context.seed + 1, context.seed + 1000))
        context.say("warming up, and the throughput of all at once")
        _load(stack, 8, 8.0, next(seeds), flags.max_tokens)
        whole = _load(stack, count, _ALL_AT_ONCE, next(seeds), flags.max_tokens)
        rate = len(whole.run.answers) / whole.span_s
        lessons, predicted = [], {}
        for share in LESSONS:
            context.say(f"{count} requests at {share * rate:.1f}/s to learn the costs from")
            lessons.append(_load(stack, count, share * rate, next(seeds), flags.max_tokens))
        for percent in shares:
            context.say(f"{count} requests at {percent / 100 * rate:.1f}/s to be predicted")
            predicted[percent] = _load(stack, count, percent / 100 * rate, next(seeds), flags.max_tokens)
    costs = _costs(lessons, setting)
    found = {percent: _replay(load.run, costs, setting) for percent, load in predicted.items()}
    for percent, (records, overhead_s) in found.items():
        _record(context, percent, predicted[percent].run, records, overhead_s)
    failures = sum(one.run.failures for one in (whole, *lessons, *predicted.values()))
    return _outcome(predicted, found, costs, rate, failures)


def _settings(setting: Setting) -> dict[str, object]:
    return {
        "worker.threads": 1,
        "worker.prefix_cache.enabled": False,
        "worker.kv_blocks": setting.kv_blocks,
        "worker.block_tokens": BLOCK_TOKENS,
        "scheduler.policy": setting.policy,
        "scheduler.max_batch_sequences": setting.sequences,
        "scheduler.token_budget": TOKEN_BUDGET,
        "scheduler.max_steps": MAX_STEPS,
    }


def _load(stack: Stack, count: int, rate: float, seed: int, max_tokens: int) -> Load:
    before, own_s = stack.cpu_s(), time.process_time()
    run = run_load(stack, chat_bodies(count, seed, max_tokens), rate, seed, max_tokens)
    if run.failures == len(run.answers):
        raise InternalError(f"no request was answered: {run.answers[0].error}")
    used = {name: spent_s - before.get(name, 0.0) for name, spent_s in stack.cpu_s().items()}
    engine_s = sum(spent_s for name, spent_s in used.items() if name.endswith("engine"))
    span_s = max(one.ended_s for one in run.answers) - run.start_s
    rest_s = sum(used.values()) - engine_s + time.process_time() - own_s
    return Load(run, span_s, engine_s, rest_s)


# What it costs


def _costs(lessons: Sequence[Load], setting: Setting) -> Costs:
    """From the step reports and the CPU times of the lessons."""
    request_s, token_s = _rest_costs(lessons)
    count = cores()
    slowed = [_slowed(load.engine_s / load.span_s, load.rest_s / load.span_s, count) for load in lessons]
    steps = [
        MeasuredStep(
            event.prefilled_tokens, event.decoded_tokens // done, event.step_s / factor, event.context_tokens
        )
        for load, factor in zip(lessons, slowed, strict=True)
        for _, event, done in _reported(load.run)
        if event.step_s > 0 and event.prefilled_tokens + event.decoded_tokens
    ]
    gaps_s = [gap_s for load in lessons for gap_s in _gaps_s(load.run)]
    step = fit_linear(steps, name="this machine", overhead_s=max(0.0, statistics.median(gaps_s or [0.0])))
    bare = Costs(step, 0.0, request_s, token_s, count)
    overheads_s = [_overhead_s(load, bare, setting) for load in lessons]
    return Costs(step, max(0.0, statistics.fmean(overheads_s)), request_s, token_s, count)


def _rest_costs(lessons: Sequence[Load]) -> tuple[float, float]:
    """CPU time of everything but the engines, of a request and of a token: neither is negative."""
    sizes = np.array([(len(_answered(load.run)), load.tokens) for load in lessons], dtype=float)
    spent_s = np.array([load.rest_s for load in lessons])
    request_s, token_s = np.linalg.lstsq(sizes, spent_s, rcond=None)[0].tolist()
    if request_s < 0 or token_s < 0:
        return 0.0, float(spent_s.sum() / sizes[:, 1].sum())
    return request_s, token_s


def _slowed(engine: float, rest: float, cores: int) -> float:
    """How much longer a step takes where both want so many cores."""
    return max(1.0, (engine + rest) / cores)


def _waiting(engine: float, rest: float, cores: int) -> float:
    """How much longer what the rest does takes, in its own queue, on what the engines leave."""
    use = min(_MOST_USE, rest / max(0.1, cores - min(engine, cores)))
    return 1.0 / (1.0 - use)


def _overhead_s(load: Load, costs: Costs, setting: Setting) -> float:
    """What a first token takes beyond the simulated time, on an idle machine."""
    records, _ = _replay(load.run, costs, setting)
    beyond_s = statistics.median(
        load.run.answers[record.request.index].first_s - (record.first_token_s - record.request.arrival_s)
        for record in records
    )
    return beyond_s / _waiting(load.engine_s / load.span_s, load.rest_s / load.span_s, costs.cores)


def _reported(run: LiveRun) -> Iterator[tuple[float, WorkerStepped, int]]:
    """When each report came, and how many steps it is about: of a plan of several not all are reported. One
    of several that prefills is left out: which of them did is not known."""
    heard: dict[str, tuple[int, int]] = {}
    for at_s, event in run.steps:
        plan_seq, steps_done = heard.get(event.worker_id, (0, 0))
        if event.plan_seq != plan_seq:
            steps_done = 0
        done = event.steps_done - steps_done
        heard[event.worker_id] = event.plan_seq, event.steps_done
        if done == 1 or (done > 1 and not event.prefilled_tokens):
            yield at_s, event, done


def _gaps_s(run: LiveRun) -> list[float]:
    by_worker: dict[str, list[tuple[float, WorkerStepped, int]]] = {}
    for one in _reported(run):
        by_worker.setdefault(one[1].worker_id, []).append(one)
    gaps_s = [
        (later_s - earlier_s) / done - later.step_s
        for reports in by_worker.values()
        for (earlier_s, earlier, _), (later_s, later, done) in pairwise(reports)
        if later.seq == earlier.seq + 1
    ]
    return [gap_s for gap_s in gaps_s if gap_s < _LONGEST_GAP_S]


def _answered(run: LiveRun) -> list[int]:
    """Indices of the answers that can be compared."""
    return [i for i, one in enumerate(run.answers) if one.ok and one.completion_tokens and one.event_s]


# Simulated


def _replay(run: LiveRun, costs: Costs, setting: Setting) -> tuple[list[ServedRecord], float]:
    """The run's requests through the simulator, in their order, and what is added to each.

    Steps that take longer leave the rest a larger share, so the two are found in turns."""
    requests = [
        SimRequest(
            index,
            run.answers[index].sent_s - run.start_s,
            run.answers[index].prompt_tokens,
            run.answers[index].completion_tokens,
            run.max_tokens,
        )
        for index in _answered(run)
    ]
    rest_s = costs.request_s * len(requests) + costs.token_s * sum(one.output_tokens for one in requests)
    factor, engine, rest, records = 1.0, 0.0, 0.0, list[ServedRecord]()
    for _ in range(_FITS):
        records, busy_s = _simulated(requests, costs.step.times(factor), setting)
        span_s = max(record.end_s for record in records) - min(one.arrival_s for one in requests)
        engine, rest = busy_s / factor / span_s, rest_s / span_s
        before, factor = factor, _slowed(engine, rest, costs.cores)
        if abs(factor - before) < 0.01:
            break
    return records, costs.overhead_s * _waiting(engine, rest, costs.cores)


def _simulated(
    requests: Sequence[SimRequest], cost: LinearCost, setting: Setting
) -> tuple[list[ServedRecord], float]:
    """By request, and for how long workers were busy in all."""
    settings = PolicySettings(
        max_batch_sequences=setting.sequences, token_budget=TOKEN_BUDGET, max_steps=MAX_STEPS
    )
    shape = WorkerShape(BLOCK_TOKENS, setting.kv_blocks)
    router = find_router("worst_fit")
    setup = Setup(
        setting.policy, shape, settings, cost, NoPredictor(), workers=setting.workers, router=router
    )
    outcome = Simulation(setup, requests).run()
    records = sorted(outcome.records, key=lambda record: record.request.index)
    return records, sum(meter.busy_s for meter in outcome.meters)


# Side by side


def _live_figures(run: LiveRun) -> dict[str, float]:
    answers = [run.answers[index] for index in _answered(run)]
    first_s, whole_s = [one.first_s for one in answers], [one.ended_s - one.sent_s for one in answers]
    span_s = max(one.ended_s for one in answers) - min(one.sent_s for one in answers)
    return _figures(first_s, whole_s, [one.completion_tokens for one in answers], span_s)


def _simulated_figures(records: Sequence[ServedRecord], overhead_s: float) -> dict[str, float]:
    first_s = [record.first_token_s - record.request.arrival_s + overhead_s for record in records]
    whole_s = [record.jct_s + overhead_s for record in records]
    span_s = max(r.end_s for r in records) - min(r.request.arrival_s for r in records) + overhead_s
    return _figures(first_s, whole_s, [record.request.output_tokens for record in records], span_s)


def _figures(
    first_s: Sequence[float], whole_s: Sequence[float], tokens: Sequence[int], span_s: float
) -> dict[str, float]:
    shares = [whole / count for whole, count in zip(whole_s, tokens, strict=True)]
    values = (
        sum(tokens) / span_s,
        percentile(first_s, 50),
        percentile(first_s, 99),
        percentile(whole_s, 50),
        percentile(whole_s, 99),
        statistics.fmean(shares),
    )
    return dict(zip(FIGURES, values, strict=True))


def _record(
    context: Context, percent: int, run: LiveRun, records: Sequence[ServedRecord], overhead_s: float
) -> None:
    for record in records:
        answer = run.answers[record.request.index]
        context.record(
            {
                "share": percent,
                "arrival_s": record.request.arrival_s,
                "prompt_tokens": record.request.prompt_tokens,
                "output_tokens": record.request.output_tokens,
                "live_ttft_s": answer.first_s,
                "simulated_ttft_s": record.first_token_s - record.request.arrival_s + overhead_s,
                "live_jct_s": answer.ended_s - answer.sent_s,
                "simulated_jct_s": record.jct_s + overhead_s,
            }
        )


def _outcome(
    predicted: dict[int, Load],
    found: dict[int, tuple[list[ServedRecord], float]],
    costs: Costs,
    rate: float,
    failures: int,
) -> Outcome:
    """`NAME_error_PERCENT`: simulated / live - 1."""
    figures: dict[str, float] = {}
    rows: list[tuple[object, ...]] = []
    for percent, load in predicted.items():
        live, made = _live_figures(load.run), _simulated_figures(*found[percent])
        for name in FIGURES:
            error = figures[f"{name}_error_{percent}"] = made[name] / live[name] - 1
            rows.append((f"{percent} %", name, f"{live[name]:.4g}", f"{made[name]:.4g}", f"{error:+.1%}"))
    figures |= {
        "requests_per_s": rate,
        "step_fixed_ms": 1e3 * costs.step.fixed_s,
        "step_prefill_token_ms": 1e3 * costs.step.prefill_token_s,
        "step_sequence_ms": 1e3 * costs.step.sequence_s,
        "step_context_us": 1e6 * costs.step.context_s,
        "request_overhead_ms": 1e3 * costs.overhead_s,
        "rest_request_ms": 1e3 * costs.request_s,
        "rest_token_ms": 1e3 * costs.token_s,
    }
    notes = [
        "errors are simulated / live - 1; costs come from runs of their own",
        f"cores: {costs.cores} of {os.cpu_count()}; the noise of the predicted runs is in the error",
    ]
    table = Table("live and simulated", ("load", "figure", "live", "simulated", "error"), rows)
    return Outcome(figures, failures, [table], notes)
