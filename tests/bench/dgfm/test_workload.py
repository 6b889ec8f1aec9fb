"""What clients ask for is the same for every side, and sides differ in what they are to show only."""

from itertools import islice
from random import Random

from bench.dgfm.workload import KV_BLOCKS, LOADS, LONGEST_TOKENS, WORKERS, bodies, settings


def test_sides_get_the_same_requests_and_differ_in_two_settings() -> None:
    first, again = (list(islice(bodies(Random("r"), 500, 0.06), 200)) for _ in range(2))
    assert first == again
    lengths = [len(body["prompt"]) for body in first]
    assert 0 < sum(length >= 500 for length in lengths) < 40
    assert max(len(body["prompt"]) + body["max_tokens"] for body in first) <= LONGEST_TOKENS
    off, on = settings(settles=False, recalls=False), settings(settles=True, recalls=True)
    assert {key for key in off if off[key] != on[key]} == {"worker.lending.recall", "ledger.settle"}


def test_without_documents_there_are_none_and_debts_fit_what_is_lent() -> None:
    assert max(len(body["prompt"]) for body in islice(bodies(Random(1), 500, 0.0), 100)) < 500
    fraction = settings(settles=True, recalls=True)["worker.lending.max_lent_fraction"]
    lent_at_most = KV_BLOCKS * float(str(fraction))
    for load in LOADS.values():
        assert load.wanted_blocks <= lent_at_most * (WORKERS - 1)
