"""The lending simulation: every invariant after each interval, the same run twice, and what settling does."""

from dataclasses import replace

from sim.lending.run import LendingSimulation, Scenario
from sim.lending.workload import Mix

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


def test_the_same_seed_gives_the_same_run() -> None:
    short = replace(BUSY, duration_s=20.0)
    assert LendingSimulation(short).run() == LendingSimulation(short).run()
    assert LendingSimulation(short).run() != LendingSimulation(replace(short, seed=1)).run()


def test_what_is_settled_is_not_remote_any_more() -> None:
    on = LendingSimulation(BUSY).run()
    off = LendingSimulation(replace(BUSY, settles=False, repays=False)).run()
    assert on.remote_share() < off.remote_share()
