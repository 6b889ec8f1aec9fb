"""What the live part of `bench dgfm` makes of what it heard."""

from itertools import islice
from random import Random

from bench.dgfm.live import LiveRun, bodies, settings


def test_rates_and_shares_of_a_part_of_a_run() -> None:
    run = LiveRun(10.0, [(0.5, 10), (6.0, 30), (9.0, 20)], [(1.0, 5, 10), (6.0, 0, 30)], 3, [], {})
    assert run.tok_s() == 6.0
    assert run.tok_s(5.0) == 10.0
    assert run.remote_share() == 0.125
    assert run.remote_share(5.0) == 0.0
    assert run.remote_share(20.0) == 0.0


def test_sides_get_the_same_requests_and_differ_in_two_settings() -> None:
    first, again = (list(islice(bodies(Random("r"), 500), 200)) for _ in range(2))
    assert first == again
    lengths = [len(body["prompt"]) for body in first]
    assert 0 < sum(length >= 500 for length in lengths) < 40
    off, on = settings(settles=False, recalls=False), settings(settles=True, recalls=True)
    assert {key for key in off if off[key] != on[key]} == {"worker.lending.recall", "ledger.settle"}
