"""The table of accounts.

The order of creditors, kept sorted.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.ledger.core.debt_ledger import DebtLedger, Ranking
from shared.messages.lending import KvTier
from tests.services.ledger.builders import report


def test_amounts_become_tokens_and_borrowed_memory_is_not_ones_own() -> None:
    table = DebtLedger()
    table.on_reported(report("w0", free=10, borrowed=6, borrowed_free=4, lent_to={"w1": 3}), 0.0)
    account = table.get("w0")
    assert account is not None
    assert (account.total_tokens, account.own_free_tokens) == (320, 96)
    assert account.lent_to_tokens == {"w1": 48}
    assert account.lent_tokens == 48
    table.check_integrity()


def test_old_news_is_ignored() -> None:
    table = DebtLedger()
    table.on_reported(report("w0", free=5, seq=7), 0.0)
    table.on_reported(report("w0", free=9, seq=7), 0.1)
    account = table.get("w0")
    assert account is not None
    assert account.own_free_tokens == 5 * 16
    table.on_reported(report("w0", free=9, seq=1, incarnation=2), 0.2)
    table.on_reported(report("w0", free=5, seq=99), 0.3)
    account = table.get("w0")
    assert account is not None
    assert account.own_free_tokens == 9 * 16


def test_silent_workers_are_dropped() -> None:
    table = DebtLedger(silence_s=2.0)
    table.on_reported(report("w0"), 0.0)
    table.on_reported(report("w1"), 1.5)
    assert table.on_tick(2.5) == ["w0"]
    assert [account.worker_id for account in table] == ["w1"]


def test_a_refusal_and_a_promise_last_until_the_next_heartbeat() -> None:
    table = DebtLedger()
    table.on_reported(report("w0"), 0.0)
    table.on_offered("w0", "w1", 64)
    account = table.get("w0")
    assert account is not None
    assert account.offers[KvTier.DEVICE].unpromised_tokens == 96
    table.on_refused(("w0", "nobody"))
    assert account.offers[KvTier.DEVICE].refused
    table.on_reported(report("w0", seq=2), 0.25)
    account = table.get("w0")
    assert account is not None
    assert not account.offers[KvTier.DEVICE].refused
    assert account.offers[KvTier.DEVICE].unpromised_tokens == 160
    table.check_integrity()


def test_a_creditor_says_what_it_would_lend() -> None:
    table = DebtLedger()
    table.on_reported(report("w0", free=10, lendable=3), 0.0)
    account = table.get("w0")
    assert account is not None
    assert account.own_free_tokens == 48


def test_debts_are_what_both_sides_say() -> None:
    table = DebtLedger()
    table.on_reported(report("w0", lent_to={"w1": 5, "w2": 9, "gone": 1}), 0.0)
    table.on_reported(report("w1", borrowed_from={"w0": 7}, lent_to={"w0": 2}), 0.0)
    table.on_reported(report("w2", borrowed_from={"gone": 4}), 0.0)
    assert table.debts() == {("w1", "w0"): 80}
    table.on_reported(report("w0", borrowed_from={"w1": 2}, lent_to={"w1": 5}, seq=2), 0.1)
    assert table.debts() == {("w1", "w0"): 80, ("w0", "w1"): 32}
    table.check_integrity()


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.sampled_from(["", "h", "g"]), st.none() | st.integers(-9, 9)),
        max_size=40,
    ),
    st.sampled_from(["", "h", "g", "x"]),
)
def test_any_history_is_sorted_like_the_rule(moves: list[tuple[str, str, int | None]], host: str) -> None:
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
