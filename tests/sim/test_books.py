"""The worker's laws: every plan that breaks one is refused.

Where a request's time went, and the speeds that the policy is told.
"""

import pytest

from services.scheduler.policy.contract import PlannedBatch, PlannedDecode, PlannedPreemption, PlannedPrefill
from sim.books import Held, PlanError, WorkerBooks
from sim.meters import TELL_INTERVAL_S, WorkerMeter
from sim.requests import ServedRecord, SimRequest
from tests.sim.simple import Scripted, books, decode, prefill, request


def holding(*requests: SimRequest) -> WorkerBooks:
    made = books()
    for one in requests:
        made.held[one.key] = Held(ServedRecord(one))
    return made


def decoding(one: SimRequest) -> WorkerBooks:
    """Its prompt is over."""
    made = holding(one)
    ((held, item),), _ = made.apply(prefill(one, 0, one.prompt_tokens, 2))
    made.compute(held, item.end_token, 1)
    held.is_decoding, held.ran_until_s = True, 1.0
    return made


def test_a_chunk_and_a_decode_are_taken() -> None:
    one = request(prompt=6, output=5)
    made = decoding(one)
    _, (held,) = made.apply(decode(one, 2, 2))
    made.compute(held, 8, 2)
    made.check_integrity()
    assert (held.generated_tokens, held.remaining_tokens, made.allocated_blocks) == (3, 2, 2)
    made.end(held)
    assert made.allocated_blocks == made.computed_tokens == 0
    assert made.apply(decode(one, 1, 2)) == ([], []), "late items of what has ended are skipped"


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (prefill(request(), 0, 4, 17), "given out of"),
        (prefill(request(), 0, 4, 0), "0 blocks for 4 tokens"),
        (prefill(request(), 1, 4, 1), "chunk"),
        (prefill(request(), 0, 5, 2), "chunk"),
        (prefill(request(7), 0, 4, 1), "not at this worker"),
        (decode(request(), 1, 2), "before its prefill"),
        (PlannedBatch(preemptions=(PlannedPreemption(request().key),)), "before it ran"),
        (PlannedBatch(steps=0, prefills=(PlannedPrefill(request().key, 0, 4, 1),)), "0 steps"),
        (
            PlannedBatch(
                prefills=(PlannedPrefill(request().key, 0, 4, 1),),
                decodes=(PlannedDecode(request().key, 1, 1),),
            ),
            "two items",
        ),
    ],
)
def test_a_fresh_sequence_refuses(batch: PlannedBatch, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        holding(request()).apply(batch)


def test_budget_and_batch_are_limits() -> None:
    many = [request(i, prompt=5) for i in range(9)]
    items = tuple(PlannedPrefill(one.key, 0, 5, 2) for one in many)
    with pytest.raises(PlanError, match="one batch"):
        holding(*many).apply(PlannedBatch(prefills=items))
    with pytest.raises(PlanError, match="budget"):
        holding(*many).apply(PlannedBatch(prefills=items[:7]))
    holding(*many).apply(PlannedBatch(prefills=items[:6]))


def test_decodes_run_as_long_as_the_limit_lets_them() -> None:
    one = request(prompt=6, output=3, limit=3)
    with pytest.raises(PlanError, match="to its limit"):
        decoding(one).apply(PlannedBatch(steps=4, decodes=(PlannedDecode(one.key, 4, 3),)))
    made = decoding(one)
    made.apply(decode(one, 1, 3))
    with pytest.raises(PlanError, match="shrink"):
        made.apply(decode(one, 1, 2))


def test_an_eviction_frees_and_counts() -> None:
    one = request(prompt=6, output=5)
    made = decoding(one)
    made.apply(PlannedBatch(preemptions=(PlannedPreemption(one.key),)))
    held = made.held[one.key]
    assert (made.allocated_blocks, held.computed_tokens, held.prefill_tokens) == (0, 0, 7)
    assert held.record.evictions == 1
    assert not held.is_decoding
    made.check_integrity()


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
