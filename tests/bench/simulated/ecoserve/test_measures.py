"""Knees by simulation: sustained is not stable, and the yardstick is the peer's."""

import math
from dataclasses import replace

import pytest

from bench.simulated.ecoserve.measures import (
    LATENCY_FACTOR,
    KneeQuestion,
    RateQuestion,
    answer_knee,
    answer_rate,
    measure_reference,
)
from sim.case import Case, run_case
from sim.summary import normalized_latency_s
from sim.workloads import Source

PEER = Case(Source("alpaca"), "vllm", "none", requests=150)


def test_the_peer_is_its_own_yardstick() -> None:
    reference = measure_reference(PEER)
    calm_s = reference.limit_s / LATENCY_FACTOR
    assert normalized_latency_s(run_case(PEER.at(reference.capacity_per_s / 10)).records) == pytest.approx(
        calm_s
    )
    knee = answer_knee(KneeQuestion("vllm", PEER, reference.limit_s, reference.capacity_per_s, (0, 1)))
    assert knee > 0.3 * reference.capacity_per_s
    stable = KneeQuestion("vllm", PEER, math.inf, reference.capacity_per_s, (0,), reference.longest_s)
    assert answer_knee(replace(stable, longest_s=math.inf)) == pytest.approx(4 * reference.capacity_per_s)
    assert answer_knee(replace(stable, longest_s=1.0)) < 4 * reference.capacity_per_s


def test_a_rate_is_summarized_over_seeds() -> None:
    level = measure_reference(PEER).level
    both = answer_rate(RateQuestion("vllm", PEER, 5.0, level, (0, 1)))
    each = [answer_rate(RateQuestion("vllm", PEER, 5.0, level, (seed,))) for seed in (0, 1)]
    assert both["normalized_s"] == pytest.approx(sum(one["normalized_s"] for one in each) / 2)
