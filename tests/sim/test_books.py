"""The worker's laws: every plan that breaks one is refused."""

import pytest

from services.scheduler.policy.contract import PlannedBatch, PlannedDecode, PlannedPreemption, PlannedPrefill
from sim.books import Held, PlanError, WorkerBooks
from sim.requests import ServedRecord, SimRequest
from tests.sim.simple import books, decode, prefill, request


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


def test_an_eviction_frees_and_counts() -> None:
    one = request(prompt=6, output=5)
    made = decoding(one)
    made.apply(PlannedBatch(preemptions=(PlannedPreemption(one.key),)))
    held = made.held[one.key]
    assert (made.allocated_blocks, held.computed_tokens, held.prefill_tokens) == (0, 0, 7)
    assert held.record.evictions == 1
    assert not held.is_decoding
    made.check_integrity()
