"""One simulated worker: its queue, its memory, its ends."""

from itertools import repeat

import pytest

from sim.lending.cost import LendingCost
from sim.lending.member import BLOCK_TOKENS, LOOKAHEAD, PATIENCE_S, LendingWorker
from sim.lending.workload import LendingJob


def member(prompt: int = 100, output: int = 28, blocks: int = 10) -> LendingWorker:
    stream = (LendingJob(number, prompt, output) for number, _ in enumerate(repeat(None)))
    return LendingWorker("w0", blocks, stream, LendingCost(), bounce_blocks=2)


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


def test_time_that_serves_debtors_is_not_its_own() -> None:
    one = member()
    one.fill_queue(0.0)
    one.start(0, blocks=1, now_s=0.0)
    one.prefill_s = 0.0
    one.advance(10 * 0.02, 0.02, 0.5)
    assert one.iterations == 5


def test_nobody_overtakes_who_has_waited_for_long() -> None:
    one = member()
    one.fill_queue(0.0)
    assert one.next_job(3, PATIENCE_S) is not None
    assert one.next_job(3, PATIENCE_S + 1) is None
    assert one.next_job(0, PATIENCE_S + 1) is not None
    assert one.next_job(LOOKAHEAD, 0.0) is None
