"""Cases: all of a run by name, and runs that are broken off."""

import math
from dataclasses import replace

import pytest

from shared.errors import ConfigError
from sim.case import Case, Machine, latency_within_s, run_case
from sim.summary import normalized_latency_s
from sim.workloads import Source

CASE = Case(Source("alpaca"), requests=60, rate_per_s=3.0, predictor="oracle")


def test_a_case_runs_and_replays() -> None:
    first, second = run_case(CASE), run_case(CASE, is_checked=True)
    assert len(first.records) == 60
    assert first.records == second.records


def test_a_latency_within_its_limit_is_the_run_s_own() -> None:
    latency_s = normalized_latency_s(run_case(CASE).records)
    assert latency_within_s(CASE, 2 * latency_s) == pytest.approx(latency_s)
    assert latency_within_s(CASE, 0.9 * latency_s) == math.inf


def test_a_queue_that_is_left_over_breaks_the_run_off() -> None:
    crowd = CASE.at(200.0)
    assert latency_within_s(crowd, 1e9) < math.inf
    assert latency_within_s(crowd, 1e9, longest_drain_s=1.0) == math.inf


@pytest.mark.parametrize(
    "case",
    [replace(CASE, policy="nobody"), replace(CASE, predictor="nobody"), replace(CASE, placement="nobody")],
)
def test_names_that_do_not_exist_are_told(case: Case) -> None:
    with pytest.raises(ConfigError):
        run_case(case)


def test_a_request_that_no_worker_holds_is_told_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"a worker's KV holds 64"):
        run_case(replace(CASE, machine=Machine(block_tokens=32, capacity_blocks=2)))
