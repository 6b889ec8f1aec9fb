"""From live loads to what the simulator has to know of this machine, and loads replayed with it.

Of a step: tokens, sequences and contexts, fitted to what workers reported, and how far single steps were
from that (`ratios`). Of everything but the engines: CPU time for each request and token. Three numbers are
found by replaying the lessons themselves until they come out as they went: how long steps take in all (what a
fit to single steps leaves open), how many threads of the rest are at work at once, and what is added to a
first token on an idle machine. The loads that are predicted have no part in it.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from bench.kit.stats import percentile
from bench.live.sim_check.loads import Load, Seen, Setting, Step
from services.scheduler.core.rules import Rules
from services.scheduler.policy.contract import PolicySettings, WorkerShape
from services.worker.core.costs.linear import LinearCost, MeasuredStep, fit_linear
from sim.cores import CoreCosts
from sim.predictors import NoPredictor
from sim.requests import SimRequest
from sim.routers import find_router
from sim.setup import Setup
from sim.simulation import Simulation

BLOCK_TOKENS = 16
MAX_STEPS = 8
TOKEN_BUDGET = 512
LANES = (1.0, 1.5, 2.0, 3.0)
"""Of which one is chosen."""
_LONGEST_GAP_S = 0.02
"""Between two steps of a busy worker; more is idleness."""
_FITS = 3
_RATIOS = 1000
_MOST_SCALED = 2.0


@dataclass(frozen=True)
class Costs:
    """What the simulator has to know of this machine."""

    step: LinearCost
    rest: CoreCosts
    overhead_s: float = 0.0
    """Of a first token, on an idle machine: gateway, bus, client."""
    scale: float = 1.0
    """In `step`: by which the fit was too short."""


def learn(lessons: Sequence[Load], setting: Setting) -> Costs:
    """From the step reports and CPU times of the lessons, and from replaying them."""
    frame_s, token_s = _rest_costs(lessons)
    steps = [one for load in lessons for one in _measured(load)]
    gaps_s = [gap_s for load in lessons for gap_s in _gaps_s(load)]
    gap_s = max(0.0, statistics.median(gaps_s or [0.0]))
    step = fit_linear(steps, name="this machine", overhead_s=gap_s)
    ratios = _ratios(steps, step, gap_s)
    bare = Costs(step, CoreCosts(setting.cores, 0.0, token_s, ratios=ratios, frame_s=frame_s))
    found = [_settled(lessons, _with_lanes(bare, lanes), setting) for lanes in LANES]
    return min(found, key=lambda costs: _error(lessons, costs, setting))


def replay(load: Load, costs: Costs, setting: Setting) -> list[Seen]:
    """The load's requests through the simulator, in their order, as clients would see their answers."""
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
    records = sorted(Simulation(setup, requests).run().records, key=lambda record: record.request.index)
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


def figures(answers: Sequence[Seen]) -> dict[str, float]:
    """Of one load, live or simulated."""
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


# By replaying


def _with_lanes(costs: Costs, lanes: float) -> Costs:
    return replace(costs, rest=replace(costs.rest, lanes=lanes))


def _settled(lessons: Sequence[Load], costs: Costs, setting: Setting) -> Costs:
    """With the length of steps and the overhead at which the lessons take as long as they took."""
    for _ in range(_FITS):
        made = [replay(load, costs, setting) for load in lessons]
        ratios = [
            _writing_s(load.answers) / max(1e-9, _writing_s(answers))
            for load, answers in zip(lessons, made, strict=True)
        ]
        scale = costs.scale * math.prod(ratios) ** (1 / len(ratios))
        scale = max(1 / _MOST_SCALED, min(_MOST_SCALED, scale))
        overheads_s = [
            statistics.median(
                [one.first_s - other.first_s for one, other in zip(load.answers, answers, strict=True)]
            )
            for load, answers in zip(lessons, made, strict=True)
        ]
        overhead_s = max(0.0, costs.overhead_s + statistics.fmean(overheads_s))
        step = costs.step.times(scale / costs.scale)
        costs = replace(costs, step=step, overhead_s=overhead_s, scale=scale)
    return costs


def _writing_s(answers: Sequence[Seen]) -> float:
    """From first tokens to ends, all together."""
    return sum(one.whole_s - one.first_s for one in answers)


def _error(lessons: Sequence[Load], costs: Costs, setting: Setting) -> float:
    """Of latencies in the lessons, in logarithms."""
    total = 0.0
    for load in lessons:
        live, made = figures(load.answers), figures(replay(load, costs, setting))
        total += sum(abs(math.log(made[name] / live[name])) for name in live if name != "throughput")
    return total


# From reports


def _rest_costs(lessons: Sequence[Load]) -> tuple[float, float]:
    """CPU time of everything but the engines, of a step and of a token: neither is negative. A request's is
    in that of its tokens, since answers of one load are about as long as those of another."""
    steps = [sum(done for _, done in _reported(load)) for load in lessons]
    sizes = np.array([(count, load.tokens) for count, load in zip(steps, lessons, strict=True)], dtype=float)
    spent_s = np.array([load.rest_s for load in lessons])
    frame_s, token_s = np.linalg.lstsq(sizes, spent_s, rcond=None)[0].tolist()
    if frame_s < 0 or token_s < 0:
        return 0.0, float(spent_s.sum() / sizes[:, 1].sum())
    return frame_s, token_s


def _measured(load: Load) -> list[MeasuredStep]:
    return [
        MeasuredStep(one.prefilled_tokens, one.decoded_tokens // done, one.step_s, one.context_tokens)
        for one, done in _reported(load)
        if one.step_s > 0 and one.prefilled_tokens + one.decoded_tokens
    ]


def _ratios(steps: Sequence[MeasuredStep], cost: LinearCost, gap_s: float) -> tuple[float, ...]:
    """What steps took over what they cost, in order of size; their mean, by cost, is 1."""
    costs_s = [cost.step_s(_chunks(one), one.decoded_tokens, one.context_tokens) for one in steps]
    took_s = [one.step_s + gap_s for one in steps]
    mean = sum(took_s) / sum(costs_s)
    ordered = sorted(took / costs / mean for took, costs in zip(took_s, costs_s, strict=True))
    count = min(len(ordered), _RATIOS)
    return tuple(ordered[(2 * at + 1) * len(ordered) // (2 * count)] for at in range(count))


def _chunks(step: MeasuredStep) -> list[tuple[int, int]]:
    return [(0, step.prefilled_tokens)] if step.prefilled_tokens else []


def _reported(load: Load) -> Iterator[tuple[Step, int]]:
    """Each report, and how many steps it is about: of a plan of several not all are reported. One of several
    that prefills is left out: which of them did is not known."""
    heard: dict[str, tuple[int, int]] = {}
    for one in load.steps:
        plan_seq, steps_done = heard.get(one.worker_id, (0, 0))
        if one.plan_seq != plan_seq:
            steps_done = 0
        done = one.steps_done - steps_done
        heard[one.worker_id] = one.plan_seq, one.steps_done
        if done == 1 or (done > 1 and not one.prefilled_tokens):
            yield one, done


def _gaps_s(load: Load) -> list[float]:
    by_worker: dict[str, list[tuple[Step, int]]] = {}
    for one in _reported(load):
        by_worker.setdefault(one[0].worker_id, []).append(one)
    gaps_s = [
        (later.at_s - earlier.at_s) / done - later.step_s
        for reports in by_worker.values()
        for (earlier, _), (later, done) in pairwise(reports)
        if later.seq == earlier.seq + 1
    ]
    return [gap_s for gap_s in gaps_s if gap_s < _LONGEST_GAP_S]
