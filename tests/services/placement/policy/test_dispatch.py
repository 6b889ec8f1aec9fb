"""Best fit and worst fit over time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.placement.policy.contract import Action, Operation, PackingPolicy
from services.placement.policy.dispatch import DispatchPolicy
from services.placement.policy.load_balance import LoadBalance
from shared.errors import InvalidRequest
from tests.services.placement.policy.histories import CAPACITY, World, steps


def made(name: str) -> PackingPolicy:
    return (
        LoadBalance(CAPACITY)
        if name == "load_balance"
        else DispatchPolicy(CAPACITY, is_tight=name == "best_fit")
    )


@settings(max_examples=60, deadline=None)
@given(steps, st.sampled_from(["best_fit", "worst_fit", "load_balance"]), st.integers(1, 30))
def test_every_operation_conserves_requests_and_capacity(
    history: list[tuple[int, int, int]], name: str, workers: int
) -> None:
    world, twin = World(made(name), workers), World(made(name), workers)
    for step in history:
        one = world.operation(*step)
        assert world.apply([one]) == twin.apply([one])


def test_the_tightest_and_the_roomiest() -> None:
    for name, home in (("best_fit", "w0"), ("worst_fit", "w1")):
        policy = made(name)
        for worker in ("w0", "w1"):
            policy.add_worker(worker)
        policy.allocate("a", 200)
        policy.allocate("b", 100)
        assert policy.allocate("c", 30).placed == {"c": home}


def test_the_youngest_is_recomputed_elsewhere_when_its_worker_overflows() -> None:
    policy = made("best_fit")
    for worker in ("w0", "w1"):
        policy.add_worker(worker)
    policy.allocate("old", 100)
    policy.allocate("young", 130)
    effects = policy.grow("old", 120)
    assert [(move.request, move.target) for move in effects.moves] == [("young", "w1")]
    assert effects.recomputes == 1 and effects.activated == ["w1"]
    policy.check_integrity()


def test_without_another_worker_it_is_displaced() -> None:
    policy = made("best_fit")
    policy.add_worker("w0")
    policy.allocate("old", 100)
    policy.allocate("young", 130)
    assert policy.grow("old", 120).displaced == ["young"]
    assert policy.allocate("other", 200).waiting == ["other"]
    with pytest.raises(InvalidRequest, match="borrow"):
        policy.grow("old", CAPACITY + 1)
    assert policy.remove_worker("w0") == ["old"]
    assert policy.active_workers == 0


def test_an_epoch_ends_before_it_grows_and_grows_before_it_allocates() -> None:
    policy = made("best_fit")
    policy.add_worker("w0")
    policy.allocate("a", 100)
    policy.allocate("b", 130)
    effects = policy.apply(
        [
            Operation(Action.ALLOCATE, "c", 90),
            Operation(Action.GROW, "b", 150),
            Operation(Action.END, "a"),
        ]
    )
    assert effects.placed == {"c": "w0"} and not effects.moves
