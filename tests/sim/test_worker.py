"""One simulated worker: by a script, its laws, its prefixes and its loans."""

from dataclasses import replace
from itertools import repeat
from typing import Any

import pytest

from services.scheduler.policy.contract import (
    PlannedBatch,
    PlannedDecode,
    PlannedPreemption,
    PlannedPrefill,
    PolicySettings,
    WorkerShape,
)
from services.worker.core.costs import find_cost
from services.worker.core.costs.fitted import LLAMA2_13B_2_A100, RemoteCost
from shared.blocks import HASH_BYTES, BlockHash
from sim.books import Held, PlanError, WorkerBooks
from sim.lending.member import BLOCK_TOKENS, LOOKAHEAD, PATIENCE_S, LendingWorker
from sim.lending.run import LendingSimulation, Scenario
from sim.lending.workload import LendingJob, Mix
from sim.meters import WorkerMeter
from sim.prefixes import SimPrefixes
from sim.requests import ServedRecord, SimRequest
from sim.routers import find_router
from sim.setup import Outcome
from sim.worker import SimWorker
from tests.sim.simple import OneSecond, Scripted, books, decode, prefill, request, simulated


def worker(script: list[PlannedBatch], *requests: SimRequest, ahead: int = 1) -> tuple[SimWorker, Scripted]:
    policy = Scripted(script)
    made = SimWorker(policy, books(), OneSecond(), WorkerMeter(), ahead)
    for one in requests:
        made.books.held[one.key] = Held(ServedRecord(one))
    return made, policy


def step(made: SimWorker, now_s: float) -> tuple[float, list[Held]]:
    """Plan, run to the end of the stretch."""
    made.next_plans(now_s)
    end = made.stretch_end()
    assert end is not None
    return end[0], made.advance(end[0])


def test_a_stretch_ends_with_the_first_answer() -> None:
    short, long = request(0, output=3), request(1, output=9)
    both = PlannedBatch(steps=4, decodes=decode(short, 4, 2).decodes + decode(long, 4, 2).decodes)
    start = PlannedBatch(prefills=prefill(short, 0, 4, 1).prefills + prefill(long, 0, 4, 1).prefills)
    made, policy = worker([start, both], short, long)
    now_s, _ = step(made, 0.0)
    assert now_s == 1.0
    now_s, ended = step(made, now_s)
    assert now_s == 3.0 and [held.record.request for held in ended] == [short]
    assert ("ended", (short.key, 3.0)) in policy.heard
    now_s, _ = step(made, now_s)
    assert now_s == 5.0, "the plan goes on without it, to its end"
    assert made.books.held[long.key].generated_tokens == 5


def test_the_next_plan_is_made_in_the_last_step_of_the_one_that_runs() -> None:
    one = request(output=12)
    script = [prefill(one, 0, 4, 1), decode(one, 4, 2), decode(one, 4, 4)]
    made, policy = worker(script, one, ahead=2)
    now_s, _ = step(made, 0.0)
    assert len(policy.script) == 1, "with two steps wanted, the decodes were planned while the prompt ran"
    now_s, _ = step(made, now_s)
    assert now_s == 4.0
    made.next_plans(now_s)
    assert policy.script == []


def test_an_arrival_cuts_a_long_plan_at_the_next_step() -> None:
    old, new = request(0, output=12), request(1)
    made, policy = worker([prefill(old, 0, 4, 1), decode(old, 4, 2)], old, new)
    now_s, _ = step(made, 0.0)
    made.next_plans(now_s)
    policy.script.append(prefill(new, 0, 4, 1))
    made.is_urgent = True
    made.next_plans(2.5)
    assert made.stretch_end() is not None
    end = made.stretch_end()
    assert end is not None and end[0] == 3.0
    made.advance(3.0)
    assert ("short", (old.key, 2, 3.0)) in policy.heard
    made.next_plans(3.0)
    now_s, _ = step(made, 3.0)
    assert now_s == 4.0 and made.books.held[new.key].generated_tokens == 1


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
    assert held.record.evictions == 1 and not held.is_decoding
    made.check_integrity()


BLOCK = 64


def names(*numbers: int) -> tuple[BlockHash, ...]:
    return tuple(number.to_bytes(HASH_BYTES, "big") for number in numbers)


def test_the_beginning_stays_longest_and_placement_is_told() -> None:
    prefixes = SimPrefixes(["w"], 3, BLOCK)
    prefixes.keep("w", names(1, 2, 3))
    assert prefixes.find("w", names(1, 2, 9)) == 2 * BLOCK
    prefixes.keep("w", names(8))
    assert prefixes.find("w", names(1, 2, 3)) == 2 * BLOCK, "the third was used longest ago"
    assert sum(prefixes.expected("w", names(1, 2, 3), 0.0)) == 2 * BLOCK
    prefixes.index.check_integrity()


def served(router: str) -> Outcome:
    requests = [
        SimRequest(at, 2.0 * at, 4 * BLOCK + 5, 8, 16, names=names(*(100 * (at % 3) + n for n in range(4))))
        for at in range(24)
    ]
    kinds: dict[str, Any] = {"cost": find_cost("opt-13b-a100"), "router": find_router(router), "workers": 4}
    kinds |= {"cache_blocks": 12, "cache_block_tokens": BLOCK, "is_checked": True}
    return simulated("kvasir", requests, WorkerShape(16, 200), PolicySettings(), **kinds)


def test_what_is_found_is_not_computed_again() -> None:
    ours, turns = served("prefix_aware"), served("round_robin")
    found = [record.cached_tokens for record in ours.records]
    assert found[:3] == [0, 0, 0] and found[3:] == [4 * BLOCK] * 21
    assert all(record.expected_tokens == record.cached_tokens for record in ours.records)
    assert sum(record.cached_tokens for record in turns.records) < sum(found)
    first_s = [record.first_token_s - record.request.arrival_s for record in ours.records]
    assert max(first_s[3:]) < min(first_s[:3])


COST = RemoteCost(LLAMA2_13B_2_A100)


def member(prompt: int = 100, output: int = 28, blocks: int = 10) -> LendingWorker:
    stream = (LendingJob(number, prompt, output) for number, _ in enumerate(repeat(None)))
    return LendingWorker("w0", blocks, stream, COST, bounce_blocks=2)


def test_requests_run_to_their_end_and_give_their_memory_back() -> None:
    one = member()
    one.fill_queue(0.0)
    assert len(one.queue) == LOOKAHEAD
    for _ in range(3):
        one.start(0, blocks=1, now_s=0.0)
    assert (one.pool.free_blocks, one.local_tokens) == (5, 3 * BLOCK_TOKENS)
    one.check_integrity()
    step_s, prefill_s = one.step_s({}), one.prefill_s
    one.advance(2 * prefill_s, step_s, 0.0)
    assert one.prefill_s == 0 and one.iterations * step_s == pytest.approx(prefill_s), "half the time each"
    one.advance((27.5 - one.iterations) * step_s, step_s, 0.0)
    assert len(one.running) == 3
    one.advance(step_s, step_s, 0.0)
    assert (one.finished, one.generated_tokens, one.pool.free_blocks) == (3, 84, 8)
    one.check_integrity()


def test_nobody_overtakes_who_has_waited_for_long() -> None:
    one = member()
    one.fill_queue(0.0)
    assert one.next_job(3, PATIENCE_S) is not None and one.next_job(3, PATIENCE_S + 1) is None
    assert one.next_job(0, PATIENCE_S + 1) is not None and one.next_job(LOOKAHEAD, 0.0) is None


BUSY = Scenario(
    duration_s=60.0,
    kv_tokens=30_080,
    threshold_blocks=2,
    mix=Mix(long_share=0.1, long_least_tokens=4_000, long_most_tokens=40_000, long_output_tokens=(100, 600)),
)


def test_invariants_hold_with_and_without_settling() -> None:
    for settles, repays in ((False, False), (True, False), (True, True)):
        result = LendingSimulation(replace(BUSY, settles=settles, repays=repays), check=True).run()
        assert result.finished > 50
        assert result.remote_share() > 0.01, "they borrow"
        assert result.tok_s() > 0 and (result.recalled_blocks > 0) == (settles or repays)
        assert (result.settlements > 0) <= settles
