"""Where a request's time went, and the speeds that the policy is told."""

from sim.books import Held
from sim.meters import TELL_INTERVAL_S, WorkerMeter
from sim.requests import ServedRecord
from tests.sim.simple import Scripted, books, request


def test_waits_count_to_the_part_they_belong_to() -> None:
    meter, held = WorkerMeter(), Held(ServedRecord(request(arrival_s=1.0)))
    meter.on_prefill(held, 3.0, 4.0, False)
    meter.on_prefill(held, 5.0, 6.0, True)
    meter.on_decode(held, 8.0, 9.0)
    meter.on_decode(held, 9.0, 10.0)
    meter.on_decode(held, 14.0, 15.0)
    record = held.record
    assert (record.queue_s, record.prefill_s, record.gt_wait_s) == (2.0, 3.0, 2.0)
    assert (record.decode_s, record.preempted_s, record.pauses) == (3.0, 4.0, 1)
    assert record.first_token_s == 6.0


def test_a_prefill_after_an_eviction_is_time_preempted() -> None:
    meter, held = WorkerMeter(), Held(ServedRecord(request()))
    meter.on_prefill(held, 0.0, 1.0, True)
    held.was_evicted = True
    meter.on_prefill(held, 4.0, 5.0, True)
    assert held.record.preempted_s == 4.0
    assert held.record.first_token_s == 1.0


def test_speeds_are_told_at_heartbeats() -> None:
    meter, policy, made = WorkerMeter(), Scripted([]), books()
    meter.on_stretch(made, 0, 2, 4, 2.0)
    meter.on_stretch(made, 100, 2, 1, 1.0)
    meter.tell(policy, 3.0)
    meter.tell(policy, 3.0 + TELL_INTERVAL_S / 2)
    assert policy.heard == [("measured", (200.0, 0.5))]
    assert (meter.steps, meter.busy_s, meter.forward_tokens) == (5, 3.0, 110)
