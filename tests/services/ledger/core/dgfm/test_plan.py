"""Cycles of debts and their settlements: balances stay, no cycle is left, large graphs settle fast."""

import random
import time
from collections import Counter
from graphlib import CycleError, TopologicalSorter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.ledger.core.dgfm.plan import SEARCH_STEPS, DebtGraph, Settlement, settlements

Debts = dict[tuple[str, str], int]
workers = st.sampled_from([f"w{number}" for number in range(9)])
any_debts = st.dictionaries(st.tuples(workers, workers), st.integers(1, 40), max_size=40)


def apply(debts: Debts, settled: list[Settlement]) -> Debts:
    """Return the debts left, without zeros."""
    left = dict(debts)
    for settlement in settled:
        members = settlement.members
        for pair in zip(members, (*members[1:], members[0]), strict=True):
            assert left.get(pair, 0) >= settlement.amount, "more than is owed"
            left[pair] -= settlement.amount
    return {pair: amount for pair, amount in left.items() if amount}


def balances(debts: Debts) -> Counter[str]:
    net: Counter[str] = Counter()
    for (debtor, creditor), amount in debts.items():
        net[creditor] += amount
        net[debtor] -= amount
    return Counter({name: amount for name, amount in net.items() if amount})


def has_cycle(debts: Debts, threshold: int) -> bool:
    names = sorted({name for pair in debts for name in pair})
    index = {name: at for at, name in enumerate(names)}
    numbered = {(index[a], index[b]): amount for (a, b), amount in debts.items()}
    owed = DebtGraph(len(names), numbered, threshold).owed
    try:
        TopologicalSorter(dict(enumerate(owed))).prepare()
    except CycleError:
        return True
    return False


def random_debts(instances: int, creditors: int, seed: int, most: int = 64) -> Debts:
    rng = random.Random(seed)
    pairs = ((f"w{a}", f"w{rng.randrange(instances)}") for a in range(instances) for _ in range(creditors))
    return {pair: rng.randint(1, most) for pair in pairs if pair[0] != pair[1]}


@settings(deadline=None)
@given(any_debts, st.integers(1, 10), st.sampled_from([0, 20, SEARCH_STEPS]))
def test_balances_stay_and_no_cycle_is_left(debts: Debts, threshold: int, search_steps: int) -> None:
    settled = settlements(debts, threshold, search_steps=search_steps)
    after = apply(debts, settled)
    assert balances(after) == balances(debts)
    assert not has_cycle(after, threshold)
    assert sum(after.values()) <= sum(debts.values())
    assert all(after.get(pair, 0) <= amount for pair, amount in debts.items())
    assert set(after) <= set(debts), "a settlement makes no new debtor"
    assert all(one.amount >= threshold and len(set(one.members)) == len(one.members) for one in settled)
    assert settlements(after, threshold, search_steps=search_steps) == [], "idempotent"


@settings(deadline=None)
@given(any_debts)
def test_short_cycles_come_first_then_large_amounts(debts: Debts) -> None:
    settled = settlements(debts, 1, search_steps=10**9)
    ranks = [(len(one.members), -one.amount) for one in settled]
    assert ranks == sorted(ranks)


def test_a_pair_is_settled_and_a_diamond_is_no_cycle() -> None:
    assert settlements({("a", "b"): 7, ("b", "a"): 4}, 2) == [Settlement(("a", "b"), 4)]
    diamond = {("a", "b"): 7, ("a", "c"): 7, ("b", "d"): 7, ("c", "d"): 7}
    assert settlements(diamond, 2) == []
    assert settlements({("a", "b"): 7, ("b", "a"): 1}, 2) == [], "too little to be worth a swap"
    chord = {("0", "1"): 3, ("1", "2"): 5, ("2", "3"): 4, ("3", "0"): 6, ("1", "3"): 2}
    assert settlements(chord, 1) == [Settlement(("0", "1", "3"), 2), Settlement(("0", "1", "2", "3"), 1)]
    with pytest.raises(ValueError, match="threshold"):
        settlements({}, 0)


@pytest.mark.parametrize(("creditors", "most"), [(2, 64), (3, 64), (3, 1000), (6, 64)])
def test_ten_thousand_instances_settle_within_a_second(creditors: int, most: int) -> None:
    debts = random_debts(10_000, creditors, seed=creditors, most=most)
    took_s = []
    for _ in range(3):
        began_s = time.process_time()
        settled = settlements(debts, 4)
        took_s.append(time.process_time() - began_s)
    assert not has_cycle(apply(debts, settled), 4)
    assert len(settled) > 100
    assert min(took_s) < 1.0


edges = st.dictionaries(st.tuples(st.integers(0, 6), st.integers(0, 6)), st.integers(1, 9), max_size=24)


def brute_force(debts: dict[tuple[int, int], int], threshold: int) -> set[tuple[int, ...]]:
    """Return every cycle, from its smallest node."""
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


@settings(deadline=None)
@given(edges, st.integers(1, 4))
def test_every_cycle_of_a_length_is_found_once(debts: dict[tuple[int, int], int], threshold: int) -> None:
    graph = DebtGraph(7, debts, threshold)
    expected = brute_force(debts, threshold)
    for length in range(2, 8):
        found = [tuple(cycle) for cycle in graph.cycles_of(length, 10**6)[0]]
        assert sorted(found) == sorted(path for path in expected if len(path) == length)
    assert not any(graph.owed) or expected


def test_enumeration_stops_when_its_steps_are_used_up() -> None:
    rng = random.Random(0)
    debts = {(rng.randrange(60), rng.randrange(60)): 5 for _ in range(1500)}
    graph = DebtGraph(60, debts, 1)
    found, steps = graph.cycles_of(4, 2000)
    assert found and 2000 < steps < 400_000
