"""Plans of settlements, and the coordinator that carries them out."""

import random
import time
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.ledger.core.dgfm.coordinator import (
    SEARCH_STEPS,
    Coordinator,
    DebtGraph,
    Leadership,
    Settlement,
    SettlementAsk,
    SettleRules,
    settlements,
)
from shared.messages.lending import Settled, SettlePhase

RING = {("a", "b"): 64, ("b", "c"): 48, ("c", "a"): 80}
SIZES = {"a": 16, "b": 16, "c": 16}
RULES = SettleRules(threshold_tokens=32, interval_s=1.0, most_at_once=2)


def answer(ask: SettlementAsk, blocks: int, bounce: int = 2) -> Settled:
    asked = ask.message
    bounce_blocks = bounce if asked.phase is SettlePhase.FREEZE else 0
    same: dict[str, Any] = {"settlement": asked.settlement, "phase": asked.phase, "round": asked.round}
    return Settled(blocks=blocks, bounce_blocks=bounce_blocks, **same)


def play(
    coordinator: Coordinator, asks: list[SettlementAsk], bounce: int = 2
) -> list[tuple[SettlePhase, int, int]]:
    """Let all workers agree; return (phase, round, blocks) in order."""
    seen: list[tuple[SettlePhase, int, int]] = []
    while asks:
        coordinator.check_integrity()
        seen.append((asks[0].message.phase, asks[0].message.round, asks[0].message.blocks))
        following: list[SettlementAsk] = []
        for ask in asks:
            reply = answer(ask, ask.message.blocks, bounce)
            following += coordinator.on_answer(ask.message, ask.worker_id, reply)
        asks = following
    return seen


def test_a_round_settles_what_the_bounce_buffers_hold() -> None:
    coordinator = Coordinator("l", RULES)
    asks = coordinator.on_tick(RING, SIZES, 0.0)
    assert {ask.worker_id: (ask.message.creditor_id, ask.message.debtor_id) for ask in asks} == {
        "a": ("b", "c"),
        "b": ("c", "a"),
        "c": ("a", "b"),
    }
    assert play(coordinator, asks) == [
        (SettlePhase.FREEZE, 0, 3),
        (SettlePhase.COPY, 0, 2),
        (SettlePhase.COMMIT, 0, 2),
        (SettlePhase.COPY, 1, 1),
        (SettlePhase.COMMIT, 1, 1),
        (SettlePhase.UNFREEZE, 2, 0),
    ]
    assert (coordinator.completed, coordinator.aborted, coordinator.settled_tokens) == (1, 0, 3 * 48)
    assert coordinator.running == 0


def test_the_smallest_answer_counts_and_small_amounts_are_given_up() -> None:
    coordinator = Coordinator("l", RULES)
    asks = coordinator.on_tick(RING, SIZES, 0.0)
    following: list[SettlementAsk] = []
    for ask in asks:
        following += coordinator.on_answer(ask.message, ask.worker_id, answer(ask, 1))
    assert [ask.message.phase for ask in following] == [SettlePhase.UNFREEZE] * 3
    play(coordinator, following)
    assert (coordinator.completed, coordinator.aborted, coordinator.running) == (0, 1, 0)


def test_no_worker_commits_before_all_have_copied() -> None:
    coordinator = Coordinator("l", RULES)
    asks = coordinator.on_tick(RING, SIZES, 0.0)
    copies: list[SettlementAsk] = []
    for ask in asks:
        copies += coordinator.on_answer(ask.message, ask.worker_id, answer(ask, 3))
    first, second, third = copies
    assert coordinator.on_answer(first.message, first.worker_id, answer(first, 2)) == []
    assert coordinator.on_answer(second.message, second.worker_id, answer(second, 2)) == []
    over = coordinator.on_answer(third.message, third.worker_id, None)
    assert [ask.message.phase for ask in over] == [SettlePhase.UNFREEZE] * 3
    assert coordinator.on_answer(third.message, third.worker_id, answer(third, 2)) == [], "too late"
    coordinator.check_integrity()


def test_cycles_that_share_a_worker_wait_and_unknown_workers_are_left_out() -> None:
    coordinator = Coordinator("l", RULES)
    debts = {("a", "b"): 64, ("b", "a"): 64, ("b", "c"): 48, ("c", "b"): 48, ("d", "e"): 64, ("e", "d"): 64}
    asks = coordinator.on_tick(debts, SIZES, 0.0)
    assert coordinator.busy() == {"a", "b"}
    assert coordinator.on_tick(debts, SIZES, 0.5) == [], "not yet"
    assert coordinator.on_tick(debts, SIZES, 1.0) == [], "b is busy"
    play(coordinator, asks)
    assert coordinator.on_tick({("b", "c"): 48, ("c", "b"): 48}, SIZES, 2.0) != []


def test_workers_may_have_blocks_of_different_sizes() -> None:
    coordinator = Coordinator("l", RULES)
    asks = coordinator.on_tick({("a", "b"): 64, ("b", "a"): 64}, {"a": 16, "b": 32}, 0.0)
    assert {ask.worker_id: ask.message.blocks for ask in asks} == {"a": 4, "b": 2}


SILENCE_S = 2.0


def make(ledger_id: str = "ledger-1", incarnation: int = 5) -> Leadership:
    return Leadership(ledger_id, incarnation, silence_s=SILENCE_S)


def hear(one: Leadership, *lives: tuple[str, int], from_s: float, to_s: float) -> None:
    """Announce ledgers every half second."""
    for half in range(round(2 * from_s), round(2 * to_s) + 1):
        for ledger_id, incarnation in lives:
            one.on_announced(ledger_id, incarnation, half / 2)
        one.check_integrity()


def test_a_single_ledger_leads_after_listening() -> None:
    one = make()
    assert not one.leads(100.0), "it has not even heard itself"
    hear(one, ("ledger-1", 5), from_s=0.0, to_s=1.5)
    assert not one.leads(1.9)
    hear(one, ("ledger-1", 5), from_s=2.0, to_s=2.0)
    assert one.leads(2.0) and one.leads(4.0)
    assert not one.leads(4.1), "cut off"


def test_the_smallest_id_leads_until_it_is_silent() -> None:
    first, second = make("ledger-0", 1), make()
    for one in (first, second):
        hear(one, ("ledger-0", 1), ("ledger-1", 5), from_s=0.0, to_s=4.0)
    assert (first.leads(4.0), second.leads(4.0)) == (True, False)
    assert second.heard(4.0) == ["ledger-0", "ledger-1"]
    hear(second, ("ledger-1", 5), from_s=4.5, to_s=6.0)
    assert second.leads(6.1) and second.heard(6.1) == ["ledger-1"]
    hear(second, ("ledger-0", 2), ("ledger-1", 5), from_s=6.5, to_s=6.5)
    assert not second.leads(6.5), "a new life of it is there"


def test_a_stopped_ledger_listens_again() -> None:
    one = make()
    hear(one, ("ledger-1", 5), from_s=0.0, to_s=3.0)
    assert one.leads(3.0)
    hear(one, ("ledger-1", 5), from_s=60.0, to_s=61.0)
    assert not one.leads(61.0)
    hear(one, ("ledger-1", 5), from_s=61.5, to_s=62.0)
    assert one.leads(62.0)


def test_the_later_of_two_incarnations_leads() -> None:
    old, new = make(incarnation=5), make(incarnation=6)
    for one in (old, new):
        hear(one, ("ledger-1", 5), ("ledger-1", 6), from_s=0.0, to_s=3.0)
    assert (old.leads(3.0), new.leads(3.0)) == (False, True)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=5, unique=True),
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1)), max_size=60),
)
def test_exactly_one_leads_once_all_have_heard_all(ids: list[int], noise: list[tuple[int, float]]) -> None:
    lives = [(f"ledger-{number}", 1) for number in ids]
    ledgers = [make(*life) for life in lives]
    now_s = 0.0
    for number, step_s in noise:  # Earlier announcements, heard by some ledgers.
        now_s += step_s
        ledgers[number % len(ledgers)].on_announced(f"ledger-{number}", 1, now_s)
        for one in ledgers:
            one.leads(now_s)
            one.check_integrity()
    now_s = round(now_s) + 10.0
    for one in ledgers:
        hear(one, *lives, from_s=now_s, to_s=now_s + SILENCE_S)
    leaders = [life for life, one in zip(lives, ledgers, strict=True) if one.leads(now_s + SILENCE_S)]
    assert leaders == [min(lives)]


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


@given(any_debts, st.integers(1, 10), st.sampled_from([0, 20, SEARCH_STEPS]))
def test_balances_stay_and_no_cycle_is_left(debts: Debts, threshold: int, search_steps: int) -> None:
    settled = settlements(debts, threshold, search_steps=search_steps)
    after = apply(debts, settled)
    assert balances(after) == balances(debts) and not has_cycle(after, threshold)
    assert sum(after.values()) <= sum(debts.values())
    assert all(after.get(pair, 0) <= amount for pair, amount in debts.items())
    assert set(after) <= set(debts), "a settlement makes no new debtor"
    assert all(one.amount >= threshold and len(set(one.members)) == len(one.members) for one in settled)
    assert settlements(after, threshold, search_steps=search_steps) == [], "idempotent"


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
    assert not has_cycle(apply(debts, settled), 4) and len(settled) > 100 and min(took_s) < 1.0


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
