"""Costs of this machine from live loads, and replays of loads with them.

Step costs are fitted to step reports by tokens, sequences and contexts; `ratios` are the deviations of single
steps.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.kit.stats import percentile
from bench.live.sim_check.loads import Load, Seen, Setting, Step
from services.scheduler.core.rules import Rules
from services.scheduler.policy.contract import PolicySettings, WorkerShape
from sim.cores import CoreCosts
from sim.linear_cost import LinearCost, MeasuredStep, fit_linear
from sim.predictors import NoPredictor
from sim.requests import SimRequest
from sim.routers import find_router
from sim.setup import Outcome, Setup
from sim.simulation import Simulation

BLOCK_TOKENS = 16
MAX_STEPS = 8
TOKEN_BUDGET = 512
LANES = (1.0, 1.25, 1.5, 2.0, 3.0)
"""Candidates for `lanes`."""
_FITS = 2
_RATIOS = 1000


@dataclass(frozen=True)
class Costs:
    """Costs of this machine for the simulator."""

    step: LinearCost
    rest: CoreCosts
    overhead_s: float = 0.0
    """Extra time of a first token on an idle machine: gateway, bus, client."""


def learn(lessons: Sequence[Load], setting: Setting, full: Sequence[Load] = ()) -> Costs:
    """Return the costs from the lessons' step reports, CPU times and replays. Only CPU times are used of
    the loads in `full`: their latencies only show the queue."""
    frame_s, token_s = _rest_costs([*lessons, *full])
    steps = [one for load in lessons for one in _measured(load)]
    fit = fit_linear(steps, name="this machine")
    rest = CoreCosts(setting.cores, 0.0, token_s, ratios=_ratios(steps, fit), frame_s=frame_s)
    bare = Costs(_by_cpu([*lessons, *full], fit), rest)
    found = [_settled(lessons, _with_lanes(bare, lanes), setting) for lanes in LANES]
    return min(found, key=lambda costs: _error(lessons, costs, setting))


def replay(load: Load, costs: Costs, setting: Setting) -> list[Seen]:
    """Simulate a load; return its answers in order, as clients would see them."""
    records = sorted(simulated(load, costs, setting).records, key=lambda record: record.request.index)
    return [
        Seen(
            record.request.arrival_s,
            record.first_token_s - record.request.arrival_s + record.first_late_s + costs.overhead_s,
            record.jct_s + record.end_late_s + costs.overhead_s,
            record.request.prompt_tokens,
            record.request.output_tokens,
        )
        for record in records
    ]


def simulated(load: Load, costs: Costs, setting: Setting) -> Outcome:
    """Simulate a load."""
    requests = [
        SimRequest(index, one.sent_s, one.prompt_tokens, one.output_tokens, setting.max_tokens)
        for index, one in enumerate(load.answers)
    ]
    settings = PolicySettings(
        max_batch_sequences=setting.sequences, token_budget=TOKEN_BUDGET, max_steps=MAX_STEPS
    )
    setup = Setup(
        setting.policy,
        WorkerShape(BLOCK_TOKENS, setting.kv_blocks),
        settings,
        costs.step,
        NoPredictor(),
        workers=setting.workers,
        router=find_router("worst_fit"),
        ahead_s=Rules().ahead_s,
        cores=costs.rest,
    )
    return Simulation(setup, requests).run()


def figures(answers: Sequence[Seen]) -> dict[str, float]:
    """Return the figures of one load, live or simulated."""
    first_s, whole_s = [one.first_s for one in answers], [one.whole_s for one in answers]
    span_s = max(one.sent_s + one.whole_s for one in answers) - min(one.sent_s for one in answers)
    return {
        "throughput": sum(one.output_tokens for one in answers) / span_s,
        "ttft_p50": percentile(first_s, 50),
        "ttft_p99": percentile(first_s, 99),
        "latency_p50": percentile(whole_s, 50),
        "latency_p99": percentile(whole_s, 99),
        "normalized": statistics.fmean(one.whole_s / one.output_tokens for one in answers),
    }


# Costs from replays


def _with_lanes(costs: Costs, lanes: float) -> Costs:
    return replace(costs, rest=replace(costs.rest, lanes=lanes))


def _settled(lessons: Sequence[Load], costs: Costs, setting: Setting) -> Costs:
    """Return the costs with the overhead that matches the lessons' first tokens."""
    for _ in range(_FITS):
        late_s = []
        for load in lessons:
            made = replay(load, costs, setting)
            pairs = zip(load.answers, made, strict=True)
            late_s.append(statistics.median([one.first_s - other.first_s for one, other in pairs]))
        costs = replace(costs, overhead_s=max(0.0, costs.overhead_s + statistics.fmean(late_s)))
    return costs


def _error(lessons: Sequence[Load], costs: Costs, setting: Setting) -> float:
    """Return the sum of logarithmic errors of latencies in the lessons."""
    total = 0.0
    for load in lessons:
        live, made = figures(load.answers), figures(replay(load, costs, setting))
        total += sum(abs(math.log(made[name] / live[name])) for name in live if name != "throughput")
    return total


# Costs from reports


def _rest_costs(lessons: Sequence[Load]) -> tuple[float, float]:
    """Return the CPU time outside the engines per step and per token, neither negative. A request's share
    is in its tokens, since all loads have similar answers."""
    sizes = np.array([(_steps_of(load), load.tokens) for load in lessons], dtype=float)
    spent_s = np.array([load.rest_s for load in lessons])
    frame_s, token_s = np.linalg.lstsq(sizes, spent_s, rcond=None)[0].tolist()
    if frame_s < 0 or token_s < 0:
        return 0.0, float(spent_s.sum() / sizes[:, 1].sum())
    return frame_s, token_s


def _by_cpu(lessons: Sequence[Load], fit: LinearCost) -> LinearCost:
    """Return `fit` with its step cost and its other costs scaled to the engines' CPU time."""
    spent_s = np.array(_spent(lessons, fit))
    engine_s = np.array([load.engine_s for load in lessons])
    fixed, others = np.linalg.lstsq(spent_s, engine_s, rcond=None)[0].tolist()
    if fixed <= 0 or others <= 0:
        return fit.times(float(engine_s.sum() / spent_s.sum()))
    return replace(fit.times(others), fixed_s=fixed * fit.fixed_s)


def _spent(lessons: Sequence[Load], cost: LinearCost) -> list[tuple[float, float]]:
    """Return the modelled cost of each lesson's steps: the fixed part, and the part by content."""
    found = []
    for load in lessons:
        answers = load.answers
        prompts = sum(one.prompt_tokens for one in answers)
        contexts = sum(one.output_tokens * (one.prompt_tokens + one.output_tokens / 2) for one in answers)
        inside_s = prompts * cost.prefill_token_s + load.tokens * cost.sequence_s + contexts * cost.context_s
        found.append((_steps_of(load) * cost.fixed_s, inside_s))
    return found


def _measured(load: Load) -> list[MeasuredStep]:
    return [
        MeasuredStep(one.prefilled_tokens, one.decoded_tokens // done, one.step_s, one.context_tokens)
        for one, done in _reported(load)
        if one.step_s > 0 and one.prefilled_tokens + one.decoded_tokens
    ]


def _steps_of(load: Load) -> int:
    return sum(done for _, done in _reports(load))


def _ratios(steps: Sequence[MeasuredStep], cost: LinearCost) -> tuple[float, ...]:
    """Return sorted ratios of step times to their modelled costs, normalized to a mean of 1 by cost."""
    costs_s = [cost.step_s(_chunks(one), one.decoded_tokens, one.context_tokens) for one in steps]
    mean = sum(one.step_s for one in steps) / sum(costs_s)
    ordered = sorted(one.step_s / cost_s / mean for one, cost_s in zip(steps, costs_s, strict=True))
    count = min(len(ordered), _RATIOS)
    return tuple(ordered[(2 * at + 1) * len(ordered) // (2 * count)] for at in range(count))


def _chunks(step: MeasuredStep) -> list[tuple[int, int]]:
    return [(0, step.prefilled_tokens)] if step.prefilled_tokens else []


def _reported(load: Load) -> Iterator[tuple[Step, int]]:
    """Yield the reports that describe each of their steps, without those of several steps with a prefill."""
    for one, done in _reports(load):
        if done == 1 or (done > 1 and not one.prefilled_tokens):
            yield one, done


def _reports(load: Load) -> Iterator[tuple[Step, int]]:
    """Yield each report and its number of steps; some steps of a plan are not reported."""
    heard: dict[str, tuple[int, int]] = {}
    for one in load.steps:
        plan_seq, steps_done = heard.get(one.worker_id, (0, 0))
        if one.plan_seq != plan_seq:
            steps_done = 0
        heard[one.worker_id] = one.plan_seq, one.steps_done
        yield one, one.steps_done - steps_done
