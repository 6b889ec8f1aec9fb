"""MELL against random histories: conservation, capacity, moves, and Theorem 1's properties."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.placement.policy.contract import Action, Operation
from services.placement.policy.mell import Mell
from services.placement.policy.mell.cluster import EAGER, MellSettings, lower_bound
from shared.errors import InvalidRequest
from tests.services.placement.policy.histories import CAPACITY, World, churn, exceptions, sizes, steps

CONSTANT = {"two M": 2, "three S": 2, "T at 3/4": 2, "L takes M or S": 1, "T only beside full": 2}
"""How many GPUs may break a property at any time, however many there are."""


@settings(max_examples=60)
@given(steps, st.sampled_from([EAGER, MellSettings()]), st.integers(1, 40))
def test_every_operation_conserves_requests_and_capacity(
    history: list[tuple[int, int, int]], chosen: MellSettings, workers: int
) -> None:
    world = World(Mell(CAPACITY, chosen), workers)
    for step in history:
        effects = world.apply([world.operation(*step)])
        assert effects.item_moves <= 10
        assert not (effects.waiting or effects.displaced) or world.policy.active_workers == workers


@settings(max_examples=40)
@given(steps)
def test_theorem_1_after_every_operation(history: list[tuple[int, int, int]]) -> None:
    policy = Mell(CAPACITY, EAGER)
    world = World(policy, 100)
    for step in history:
        world.apply([world.operation(*step)])
        assert {name: n for name, n in exceptions(policy.cluster).items() if n > CONSTANT[name]} == {}


@pytest.mark.parametrize("ends", [0.1, 0.34, 0.5])
@pytest.mark.parametrize(("least", "most", "growth"), [(1, 60, 20), (20, 200, 30), (70, 90, 10)])
def test_theorem_1_on_long_histories(least: int, most: int, growth: int, ends: float) -> None:
    policy = Mell(CAPACITY, EAGER)
    world = World(policy, 400)
    for step in churn(1, 500, least=least, most=most, growth=growth, ends=ends):
        effects = world.apply([world.operation(*step)])
        assert effects.item_moves <= 10
        found = exceptions(policy.cluster)
        assert {name: n for name, n in found.items() if n > CONSTANT[name]} == {}
        assert 3 * policy.active_workers <= 4 * lower_bound(world.blocks.values(), CAPACITY) + 18


@pytest.mark.parametrize("seed", [1, 4])
def test_an_item_that_finds_no_other_place_still_has_its_own(seed: int) -> None:
    world = World(Mell(CAPACITY, EAGER), 8)
    for step in churn(seed, 500, least=5, most=150, growth=10, ends=0.2):
        world.apply([world.operation(*step)])


@settings(max_examples=40)
@given(st.lists(steps, max_size=6), st.sampled_from([EAGER, MellSettings()]))
def test_epochs_conserve_and_compose(epochs: list[list[tuple[int, int, int]]], chosen: MellSettings) -> None:
    world = World(Mell(CAPACITY, chosen), 200)
    for epoch in epochs:
        operations: dict[object, Operation] = {}
        for step in epoch:
            one = world.operation(*step)
            operations[one.request] = one
        effects = world.apply(list(operations.values())) if len(operations) > 1 else None
        if effects is not None:
            moved = [move.request for move in effects.moves]
            assert len(moved) == len(set(moved)), "moved twice within an epoch"
            assert not set(moved) & {r for r, one in operations.items() if one.action is not Action.GROW} or (
                all(operations[r].action is Action.GROW for r in moved if r in operations)
            )


@settings(max_examples=30)
@given(steps)
def test_the_same_history_gives_the_same_effects(history: list[tuple[int, int, int]]) -> None:
    worlds = [World(Mell(CAPACITY), 30) for _ in range(2)]
    for step in history:
        first, second = (world.apply([world.operation(*step)]) for world in worlds)
        assert first == second


@settings(max_examples=30)
@given(steps, st.integers(0, 10**6))
def test_workers_die_and_moves_are_taken_back(history: list[tuple[int, int, int]], which: int) -> None:
    policy = Mell(CAPACITY)
    world = World(policy, 40)
    for step in history:
        effects = world.apply([world.operation(*step)])
        if effects.moves:
            aborted = effects.moves[0]
            world.apply([Operation(Action.END, aborted.request)])
            world.blocks[aborted.request] = aborted.blocks
            world.follow(policy.adopt(aborted.request, aborted.blocks, aborted.source), set())
            assert policy.worker_of(aborted.request) == aborted.source
    if not world.homes:
        return
    victim = sorted(set(world.homes.values()))[which % len(set(world.homes.values()))]
    lost = policy.remove_worker(victim)
    assert sorted(map(str, lost)) == sorted(str(r) for r, home in world.homes.items() if home == victim)
    policy.check_integrity()
    sizes_lost = {request: world.blocks.pop(request) for request in lost}
    for request in lost:
        del world.homes[request]
    for request, blocks in sizes_lost.items():
        world.apply([Operation(Action.ALLOCATE, request, blocks)])
    assert victim not in world.homes.values()


def test_a_refused_operation_changes_nothing() -> None:
    policy = Mell(CAPACITY)
    policy.add_worker("w0")
    assert policy.allocate("a", 200).placed == {"a": "w0"}
    calls: list[Callable[[], object]] = [
        lambda: policy.grow("a", CAPACITY + 1),
        lambda: policy.apply([Operation(Action.END, "a"), Operation(Action.ALLOCATE, "b", CAPACITY + 1)]),
    ]
    for call in calls:
        with pytest.raises(InvalidRequest, match="borrow"):
            call()
    for again in (lambda: policy.allocate("a", 1), lambda: policy.add_worker("w0")):
        with pytest.raises(ValueError, match="already"):
            again()
    policy.check_integrity()
    assert policy.categories() == {"w0": "L"}
    assert policy.allocate("b", 50).waiting == ["b"], "no worker to activate"
    assert policy.allocate("c", 40).placed == {"c": "w0"} and policy.grow("a", 220).displaced == ["c"]
    assert policy.end("a").terminated == ["w0"] and policy.active_workers == 0


def test_nearer_targets_come_first() -> None:
    policy = Mell(CAPACITY, MellSettings(dense_share=0.0, repair_share=0.0))
    for worker, host in (("w0", "h0"), ("w1", "h1"), ("w2", "h0")):
        policy.add_worker(worker, host=host)
        policy.adopt(f"large {worker}", 150, worker)
    policy.adopt("small", 40, "w0")
    (move,) = policy.grow("large w0", 230).moves
    assert (move.request, move.source, move.target) == ("small", "w0", "w2")


@settings(max_examples=40)
@given(st.lists(sizes, min_size=1, max_size=30))
def test_lower_bound_is_one(blocks: list[int]) -> None:
    """No policy of ours beats it."""
    world = World(Mell(CAPACITY, EAGER), 60)
    for size in blocks:
        world.apply([Operation(Action.ALLOCATE, len(world.blocks), size)])
    assert world.policy.active_workers >= lower_bound(blocks, CAPACITY)
