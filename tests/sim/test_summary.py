"""Figures of a run, by hand."""

import pytest

from sim.meters import WorkerMeter
from sim.requests import ServedRecord
from sim.simulation import Outcome
from sim.summary import ServiceLevel, measure_level, summarize
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


def test_the_level_is_measured_from_means() -> None:
    level = measure_level(outcome(), scale=1.5)
    assert (level.prefill_s, level.token_s) == (1.5, 8 / 6)
    assert level.limit_s(10) == pytest.approx(1.5 * (1.5 + 80 / 6))
