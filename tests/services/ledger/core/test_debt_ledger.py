"""The ledger's table of accounts, and the creditors that it offers: order, exclusion, spreading."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.ledger.core.debt_ledger import OFFERED_CREDITORS, DebtLedger, Ranking, candidates
from shared.messages.lending import KvTier
from tests.services.ledger.builders import promised_to, report


def free_tokens(table: DebtLedger) -> int:
    table.check_integrity()
    return table.accounts["w0"].offers[KvTier.DEVICE].free_tokens


def test_only_own_memory_within_the_limit_is_offered() -> None:
    table = DebtLedger()
    table.on_reported(report("w0", free=10, borrowed=6, borrowed_free=4), 0.0)
    assert free_tokens(table) == 6 * 16
    table.on_reported(report("w0", free=10, lendable=3, seq=2), 0.1)
    assert free_tokens(table) == 3 * 16


def test_old_heartbeats_are_ignored_and_silent_workers_are_dropped() -> None:
    table = DebtLedger(silence_s=2.0)
    table.on_reported(report("w0", free=5, seq=7), 0.0)
    table.on_reported(report("w0", free=9, seq=7), 0.1)
    assert free_tokens(table) == 5 * 16
    table.on_reported(report("w0", free=9, seq=1, incarnation=2), 0.2)
    table.on_reported(report("w0", free=5, seq=99), 0.3)
    assert free_tokens(table) == 9 * 16
    table.on_reported(report("w1"), 1.5)
    assert table.on_tick(2.5) == ["w0"] and list(table.accounts) == ["w1"]


def test_a_refusal_and_a_promise_last_until_the_next_heartbeat() -> None:
    table = DebtLedger()
    table.on_reported(report("w0"), 0.0)
    table.on_offered("w0", "w1", 64)
    assert table.accounts["w0"].offers[KvTier.DEVICE].promises == {"w1": 64}
    table.on_refused(("w0", "nobody"))
    assert table.accounts["w0"].offers[KvTier.DEVICE].refused
    table.on_reported(report("w0", seq=2), 0.25)
    offer = table.accounts["w0"].offers[KvTier.DEVICE]
    assert (offer.refused, offer.promises) == (False, {})
    table.check_integrity()


def test_a_debt_is_what_both_sides_report() -> None:
    table = DebtLedger()
    table.on_reported(report("w0", lent_to={"w1": 5, "w2": 9, "gone": 1}), 0.0)
    table.on_reported(report("w1", borrowed_from={"w0": 7}, lent_to={"w0": 2}), 0.0)
    table.on_reported(report("w2", borrowed_from={"gone": 4}), 0.0)
    assert table.debts() == {("w1", "w0"): 80}
    table.on_reported(report("w0", borrowed_from={"w1": 2}, lent_to={"w1": 5}, seq=2), 0.1)
    assert table.debts() == {("w1", "w0"): 80, ("w0", "w1"): 32}
    table.check_integrity()


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.sampled_from(["", "h", "g"]), st.none() | st.integers(-9, 9)),
        max_size=40,
    ),
    st.sampled_from(["", "h", "g", "x"]),
)
def test_any_history_is_sorted_by_the_rule(moves: list[tuple[str, str, int | None]], host: str) -> None:
    ranking, left_of = Ranking(), dict[str, tuple[str, int]]()
    for worker, at, left in moves:
        if left is None:
            ranking.remove(worker)
            left_of.pop(worker, None)
        else:
            ranking.put(worker, at, left)
            left_of[worker] = (at, left)
        ranking.check_integrity()

    def rule(worker: str) -> tuple[bool, bool, int, str]:
        at, left = left_of[worker]
        return left <= 0, not (host and at == host), -left, worker

    found = [*ranking.within(host, has_left=True), *ranking.within(host, has_left=False)]
    assert found == sorted(left_of, key=rule)


def table_of(**free_blocks: int) -> DebtLedger:
    table = DebtLedger()
    for worker, free in free_blocks.items():
        table.on_reported(report(worker, free=free), 0.0)
    return table


def ids(table: DebtLedger, debtor: str, tokens: int = 16, refused_by: tuple[str, ...] = ()) -> list[str]:
    found = [creditor.worker_id for creditor in candidates(table, debtor, tokens, refused_by)]
    table.check_integrity()
    return found


def test_neighbours_come_first_then_most_free_then_the_lowest_id_and_never_the_debtor() -> None:
    assert ids(table_of(w0=20, w1=5, w2=9, w3=5), "w0") == ["w2", "w1", "w3"]
    table = DebtLedger()
    for worker, host, free in (("w0", "a", 10), ("w1", "b", 20), ("w2", "a", 1)):
        table.on_reported(report(worker, host=host, free=free), 0.0)
    assert [(one.worker_id, one.distance) for one in candidates(table, "w0", 16)] == [("w2", 0), ("w1", 1)]


def test_a_refusing_creditor_is_left_out_until_its_next_heartbeat() -> None:
    table = table_of(w0=20, w1=5, w2=9)
    assert ids(table, "w0", refused_by=("w2",)) == ["w1"]
    assert ids(table, "w1") == ["w0"], "a refusal counts for every debtor"
    table.on_reported(report("w2", free=9, seq=2), 0.25)
    assert ids(table, "w0") == ["w2", "w1"]


def test_debtors_that_ask_together_get_different_creditors() -> None:
    table = table_of(d0=0, d1=0, w1=10, w2=9)
    assert [ids(table, debtor, tokens=64)[0] for debtor in ("d0", "d1")] == ["w1", "w2"]
    assert ids(table, "d0", tokens=64)[0] == "w1", "asking again does not compete with itself"


def test_fully_promised_workers_come_last_but_are_offered() -> None:
    table = table_of(d0=0, d1=0, w1=10, w2=1)
    assert ids(table, "d0", tokens=160) == ["w1", "w2"] and ids(table, "d1", tokens=160) == ["w2", "w1"]


def tiers(table: DebtLedger, debtor: str, **asked: Any) -> list[tuple[str, KvTier]]:
    found = [(one.worker_id, one.tier) for one in candidates(table, debtor, 16, **asked)]
    table.check_integrity()
    return found


def test_device_memory_is_offered_before_host_memory() -> None:
    device, host = KvTier.DEVICE, KvTier.HOST
    table = DebtLedger()
    for worker, free, host_free in (("w0", 0, 0), ("w1", 1, 9), ("w2", 0, 5)):
        table.on_reported(report(worker, free=free, host_lendable=host_free), 0.0)
    assert tiers(table, "w0") == [("w1", device), ("w1", host), ("w2", host)]
    assert tiers(table, "w2") == [("w1", host), ("w1", device)], "what is promised comes after both tiers"
    assert promised_to(table, "w1", host) == {"w2"}
    assert tiers(table, "w0", refused_by=("w1",)) == [("w1", host), ("w2", host)], "a refusal is for a tier"
    assert tiers(table, "w0", refused_host_by=("w2",)) == [("w1", host)]
    table.on_reported(report("w1", free=2, host_lendable=9, seq=2), 0.25)
    assert tiers(table, "w0") == [("w1", device), ("w1", host)]


def test_memory_of_caches_is_offered_to_sequences_only() -> None:
    device, host = KvTier.DEVICE, KvTier.HOST
    table = DebtLedger()
    for worker, free, host_free, yielding in (("w0", 0, 0, 0), ("w1", 4, 0, 5), ("w2", 0, 3, 2)):
        heard = report(worker, free=free, host_lendable=host_free, host_yielding=yielding)
        table.on_reported(heard, 0.0)
    assert set(tiers(table, "w0")) == {("w1", device), ("w1", host), ("w2", host)}
    assert tiers(table, "w0", for_cache=True) == [("w2", host)] and tiers(table, "w2", for_cache=True) == []


@pytest.mark.parametrize(
    ("fingerprints", "of_w0", "of_a_stranger"),
    [((b"a", b"b", b"a"), ["w2"], ["w0", "w1", "w2"]), ((b"", b"", b"a"), [], ["w2"])],
)
def test_workers_with_other_or_no_kv_are_not_offered(
    fingerprints: tuple[bytes, ...], of_w0: list[str], of_a_stranger: list[str]
) -> None:
    table = DebtLedger()
    for at, fingerprint in enumerate(fingerprints):
        table.on_reported(report(f"w{at}", fingerprint=fingerprint), 0.0)
    assert ids(table, "w0") == of_w0 and ids(table, "unheard of") == of_a_stranger


@given(
    free=st.dictionaries(st.sampled_from([f"w{i}" for i in range(8)]), st.integers(0, 20), max_size=8),
    asks=st.lists(
        st.tuples(
            st.sampled_from([f"w{i}" for i in range(10)]),
            st.integers(1, 400),
            st.lists(st.sampled_from([f"w{i}" for i in range(10)]), max_size=3),
        ),
        max_size=12,
    ),
)
def test_any_history_offers_able_creditors(
    free: dict[str, int], asks: list[tuple[str, int, list[str]]]
) -> None:
    table = table_of(**free)
    refused: set[str] = set()
    for debtor, tokens, refusing in asks:
        refused |= set(refusing)
        offered = ids(table, debtor, tokens, tuple(refusing))
        able = {w for w, blocks in free.items() if blocks > 0 and w != debtor and w not in refused}
        assert len(offered) == min(OFFERED_CREDITORS, len(able)) and set(offered) <= able
