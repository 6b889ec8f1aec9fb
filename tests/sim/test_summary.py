"""Figures of a run, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.knee import TOLERANCE, sustained_rate
from sim.meters import WorkerMeter
from sim.requests import ServedRecord
from sim.setup import Outcome
from sim.summary import ServiceLevel, summarize
from sim.sweep import sweep
from tests.sim.simple import SHAPE, request


def outcome() -> Outcome:
    fast = ServedRecord(request(0, output=5), first_token_s=1.0, end_s=5.0, prefill_s=1.0, decode_s=4.0)
    slow = ServedRecord(
        request(1, output=3, arrival_s=2.0),
        first_token_s=8.0,
        end_s=20.0,
        queue_s=4.0,
        prefill_s=2.0,
        decode_s=4.0,
    )
    slow.pauses, slow.preempted_s = 1, 8.0
    meter = WorkerMeter(
        busy_s=10.0, steps=5, forward_tokens=40, computed_token_s=320.0, allocated_block_s=80.0
    )
    return Outcome([fast, slow], [meter], SHAPE, 20.0)


def test_figures() -> None:
    figures = summarize(outcome(), ServiceLevel(prefill_s=1.0, token_s=1.0))
    assert figures["normalized_s"] == pytest.approx((5 / 5 + 18 / 3) / 2)
    assert figures["tokens_per_s"] == pytest.approx(8 / 20)
    assert figures["slo"] == 0.5
    assert figures["alloc_failures"] == 0.5
    assert figures["kvc_utilization"] == pytest.approx(0.5)
    assert figures["kvc_allocated"] == pytest.approx(0.5)
    assert figures["tbt_s"] == pytest.approx((4 / 4 + 12 / 2) / 2)
    assert figures["queue_s"] + figures["preempted_s"] == pytest.approx(6.0)


def square(number: int) -> int:
    if number < 0:
        raise ValueError("negative")
    return number * number


@pytest.mark.parametrize("processes", [1, 2])
def test_results_are_in_order_and_told(processes: int) -> None:
    told: list[tuple[int, int]] = []
    results = sweep(square, [3, 1, 2], processes=processes, on_result=lambda a, r: told.append((a, r)))
    assert results == [9, 1, 4]
    assert sorted(told) == [(1, 1), (2, 4), (3, 9)]


@given(edge=st.floats(0.01, 3.9))
def test_the_edge_is_found(edge: float) -> None:
    found = sustained_rate(lambda rate: rate <= edge, 1.0)
    assert found <= edge <= found * (1 + TOLERANCE) * (1 + 1e-9)
