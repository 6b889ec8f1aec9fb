"""Load balancing by migration."""

from services.placement.policy.load_balance import LoadBalance
from tests.services.placement.policy.histories import CAPACITY


def unequal(relief_share: float = 1.0) -> LoadBalance:
    """`a` alone on w0; `b` and the short `f` on w1."""
    policy = LoadBalance(CAPACITY, relief_share=relief_share)
    for worker in ("w0", "w1"):
        policy.add_worker(worker)
    for request, blocks in (("a", 100), ("b", 150), ("c", 20), ("d", 20), ("e", 20), ("f", 20)):
        policy.allocate(request, blocks)
    for request in "cde":
        policy.end(request)
    assert [policy.worker_of(request) for request in "abf"] == ["w0", "w1", "w1"]
    return policy


def test_an_epoch_sends_the_shortest_of_the_most_loaded_to_the_least_loaded() -> None:
    policy = unequal()
    effects = policy.apply([])
    assert [(move.request, move.source, move.target) for move in effects.moves] == [("f", "w1", "w0")]
    assert policy.apply([]).moves == []
    policy.check_integrity()


def test_workers_with_memory_enough_are_left_alone() -> None:
    assert unequal(relief_share=0.1).apply([]).moves == []


def test_an_overflow_migrates_the_shortest_and_recomputes_nothing() -> None:
    policy = unequal()
    effects = policy.grow("b", 230)
    assert [move.request for move in effects.moves] == ["f"]
    assert effects.recomputes == 0
    policy.check_integrity()
