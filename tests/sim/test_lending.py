"""One simulated worker: its queue, its memory, its ends.

Remote attention costs a round trip per layer and overlaps with local attention.

The lending simulation: every invariant after each interval, the same run twice, and what settling does.
"""

from dataclasses import replace
from itertools import repeat

import pytest

from services.worker.core.costs.fitted import LLAMA2_13B_2_A100, RemoteCost
from sim.lending.member import BLOCK_TOKENS, LOOKAHEAD, PATIENCE_S, LendingWorker
from sim.lending.run import LendingSimulation, Scenario
from sim.lending.workload import LendingJob, Mix

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
    assert one.next_job(3, PATIENCE_S) is not None
    assert one.next_job(3, PATIENCE_S + 1) is None
    assert one.next_job(0, PATIENCE_S + 1) is not None
    assert one.next_job(LOOKAHEAD, 0.0) is None


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
        assert result.tok_s() > 0
        assert (result.recalled_blocks > 0) == (settles or repays)
        assert (result.settlements > 0) <= settles
