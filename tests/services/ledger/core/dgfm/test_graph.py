"""Cycles are found, and nothing else is."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.ledger.core.dgfm.graph import DebtGraph

edges = st.dictionaries(st.tuples(st.integers(0, 6), st.integers(0, 6)), st.integers(1, 9), max_size=24)


def brute_force(debts: dict[tuple[int, int], int], threshold: int) -> set[tuple[int, ...]]:
    """Every cycle, from its smallest node on."""
    owed = {pair for pair, amount in debts.items() if amount >= threshold and pair[0] != pair[1]}
    found: set[tuple[int, ...]] = set()

    def walk(path: tuple[int, ...]) -> None:
        for debtor, creditor in owed:
            if debtor == path[-1] and creditor == path[0]:
                found.add(path)
            elif debtor == path[-1] and creditor > path[0] and creditor not in path:
                walk((*path, creditor))

    for node in range(7):
        walk((node,))
    return {path for path in found if len(path) > 1}


def test_small_debts_are_no_edges_and_settling_makes_debts_small() -> None:
    graph = DebtGraph(3, {(0, 1): 9, (1, 2): 5, (2, 0): 2}, 3)
    assert graph.is_empty
    graph = DebtGraph(3, {(0, 1): 9, (1, 2): 5, (2, 0): 3}, 3)
    graph.settle([0, 1, 2], 3)
    assert graph.owed == [{1: 6}, {}, {}]
    with pytest.raises(ValueError, match="threshold"):
        DebtGraph(1, {}, 0)


@settings(deadline=None)
@given(edges, st.integers(1, 4))
def test_every_cycle_of_a_length_is_found_once(debts: dict[tuple[int, int], int], threshold: int) -> None:
    graph = DebtGraph(7, debts, threshold)
    expected = brute_force(debts, threshold)
    for length in range(2, 8):
        found = [tuple(cycle) for cycle in graph.cycles_of(length, 10**6)[0]]
        assert sorted(found) == sorted(path for path in expected if len(path) == length)
    assert graph.is_empty or expected


def test_enumeration_stops_when_its_steps_are_used_up() -> None:
    rng = random.Random(0)
    debts = {(rng.randrange(60), rng.randrange(60)): 5 for _ in range(1500)}
    graph = DebtGraph(60, debts, 1)
    found, steps = graph.cycles_of(4, 2000)
    assert found and 2000 < steps < 400_000
