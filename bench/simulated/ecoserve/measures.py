"""Measurements of a sweep: picklable questions and the functions that answer them."""

import math
from dataclasses import dataclass, replace
from statistics import mean

from sim.case import Case, Machine, latency_within_s, run_case
from sim.knee import TOLERANCE, sustained_rate
from sim.summary import ServiceLevel, measure_level, normalized_latency_s, summarize
from sim.workloads import Source

LOW_LOAD = 0.1
"""Share of the peer's highest throughput."""
LATENCY_FACTOR = 3.0
"""A rate is not sustained above this multiple of the peer's normalized latency at low load."""
DRAIN_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Reference:
    """The peer's figures on one trace, the reference of all sides."""

    capacity_per_s: float
    """Throughput in requests per second when all requests arrive at once."""
    limit_s: float
    """Highest normalized latency of a sustained rate."""
    level: ServiceLevel
    longest_s: float
    """Job completion time of the longest request at low load."""


@dataclass(frozen=True, slots=True)
class KneeQuestion:
    """Find the knee of `case`, run once for each of `seeds`."""

    label: str
    case: Case
    limit_s: float
    start_rate: float
    seeds: tuple[int, ...]
    longest_s: float = math.inf
    """If finite, the rate must also be *stable*: the rest after the last arrival ends within this and
    `DRAIN_SHARE` of the arrivals' duration. Otherwise a policy that starves long requests has a low mean
    latency at any rate."""
    tolerance: float = TOLERANCE
    """A rate this much above the answer is not sustained."""


@dataclass(frozen=True, slots=True)
class RateQuestion:
    """Summarize one rate as the mean over `seeds`."""

    label: str
    case: Case
    rate_per_s: float
    level: ServiceLevel
    seeds: tuple[int, ...]


def measure_reference(case: Case) -> Reference:
    """Measure the reference with the peer's `case`."""
    saturated = run_case(case.at(math.inf))
    capacity_per_s = len(saturated.records) / saturated.end_s
    calm = run_case(case.at(LOW_LOAD * capacity_per_s))
    return Reference(
        capacity_per_s,
        LATENCY_FACTOR * normalized_latency_s(calm.records),
        measure_level(calm),
        max(record.jct_s for record in calm.records),
    )


def is_sustained(question: KneeQuestion, rate_per_s: float) -> bool:
    """Whether the mean over the seeds is within the limit. Runs stop once it cannot be."""
    left_s = question.limit_s * len(question.seeds)
    drain_s = question.longest_s + DRAIN_SHARE * question.case.requests / rate_per_s
    for seed in question.seeds:
        case = replace(question.case, rate_per_s=rate_per_s, seed=seed)
        latency_s = latency_within_s(case, left_s, drain_s)
        if latency_s == math.inf:
            return False
        left_s -= latency_s
    return True


def answer_knee(question: KneeQuestion) -> float:
    """Return the sustained rate in requests per second."""
    return sustained_rate(lambda rate: is_sustained(question, rate), question.start_rate, question.tolerance)


def peer_knee(source: Source, machine: Machine, requests: int) -> tuple[Reference, float]:
    """Return the reference, and the rate that one worker sustains under `vllm`."""
    case = Case(source, "vllm", "none", machine, requests=requests)
    reference = measure_reference(case)
    question = KneeQuestion("vllm", case, reference.limit_s, reference.capacity_per_s, (0,))
    return reference, answer_knee(question)


def answer_rate(question: RateQuestion) -> dict[str, float]:
    """Return `sim.summary` at that rate, as means over seeds."""
    runs = [
        summarize(run_case(replace(question.case, rate_per_s=question.rate_per_s, seed=seed)), question.level)
        for seed in question.seeds
    ]
    return {name: mean(run[name] for run in runs) for name in runs[0]}
