"""The debtor: borrowed blocks and leases, its part in a settlement, and what it borrows and returns."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.peers.core.neighbours import Neighbours
from services.worker.peers.lending.core.borrowing import (
    Balance,
    CreditorPressure,
    Marks,
    in_order,
    pressures,
)
from services.worker.peers.lending.core.debts import BlockState, Borrowed, Debts, GrantKey
from services.worker.peers.lending.core.grants import Grants, Terms
from services.worker.peers.lending.core.settling import Copy, Settling, Swap
from shared.messages.lending import (
    BlocksReturned,
    HeldGrant,
    KvTier,
    LeasesRenewed,
    Settle,
    Settled,
    SettlePhase,
)
from shared.messages.reports import Capacity
from tests.services.ledger.builders import report
from tests.services.worker.peers.lending.builders import borrow, grant

DEVICE, HOST = KvTier.DEVICE, KvTier.HOST
KEY = GrantKey("c", 1, 1)


@pytest.fixture
def debts() -> Iterator[Debts]:
    made = Debts("d", 10, incarnation=1)
    yield made
    made.check_integrity()


def renewed(*grants: int, incarnation: int = 1, wanted_back: int = 0) -> LeasesRenewed:
    held = tuple(HeldGrant(grant_id=grant_id, generation=2) for grant_id in grants)
    return LeasesRenewed(
        creditor_incarnation=incarnation, lease_s=4.0, held=held, wanted_back_blocks=wanted_back
    )


def test_a_grant_is_entered_once_under_new_numbers_and_forgotten_with_its_last_block(debts: Debts) -> None:
    assert debts.on_granted(grant("c", 5, 6), 0.0) == [10, 11], "after all own ids"
    assert debts.on_granted(grant("c", 5, 6), 0.0) == [], "known already"
    assert debts.blocks[11] == Borrowed(KEY, DEVICE, 6)
    assert debts.take(1) == [10]
    with pytest.raises(ValueError, match="1 free"):
        debts.take(2)
    debts.release([10])
    with pytest.raises(ValueError, match="not used"):
        debts.release([10])
    assert (debts.free_blocks, debts.borrowed_blocks) == (2, 2)
    for repayment in debts.give_back(2):
        debts.on_returned(repayment, BlocksReturned(generation=2))
    assert not debts.blocks and not debts.grants
    assert debts.on_granted(grant("c", 5, grant_id=2), 0.0) == [12], "numbers are not used again"


def test_leases_count_from_sending_and_renew_after_a_quarter(debts: Debts) -> None:
    debts.on_granted(grant("c", 5), 0.0)
    debts.on_granted(grant("c", 6, grant_id=2), 0.5)
    assert debts.renewals(0.9) == []
    (due,) = debts.renewals(1.0)
    assert [held.grant_id for held in due.message.held] == [1, 2]
    assert debts.renewals(1.1) == [], "asked already"
    assert debts.on_renewed(due, renewed(1, 2), sent_s=1.0) == []
    assert debts.grants[KEY].generation == 2
    debts.grants[KEY].generation = 3
    (due,) = debts.renewals(2.0)
    assert [held.generation for held in due.message.held] == [3, 2]
    debts.on_renewed(due, renewed(1, 2), sent_s=1.0)
    assert debts.grants[KEY].generation == 3, "late news do not turn the clock back"
    assert debts.tick(4.9) == []
    assert sorted(debts.tick(5.0)) == [10, 11]


def test_grants_that_ended_are_lost_and_no_others(debts: Debts) -> None:
    for number, creditor in enumerate(("c", "c", "e", "c"), 1):
        debts.on_granted(grant(creditor, number, grant_id=number), 0.0)
    used = debts.take(4)
    (at_c, _) = debts.renewals(1.0)
    assert debts.on_renewed(at_c, renewed(2, 4), sent_s=1.0) == [used[0]]
    assert debts.on_grant_over(GrantKey("c", 1, 4)) == [used[3]]
    assert debts.on_grant_over(GrantKey("c", 1, 4)) == []
    (at_c, _) = debts.renewals(2.0)
    assert debts.on_renewed(at_c, renewed(2, incarnation=9), sent_s=2.0) == [used[1]]
    assert debts.on_creditor_gone("e") == [used[2]]
    debts.release(used)
    assert debts.borrowed_blocks == 0


def test_returns_go_to_creditors_in_need_first_and_are_retried(debts: Debts) -> None:
    debts.on_granted(grant("c", 5, 6), 0.0)
    debts.on_granted(grant("e", 3), 0.0)
    (_, at_e) = debts.renewals(1.0)
    debts.on_renewed(at_e, renewed(1, wanted_back=1), sent_s=1.0)
    assert debts.wanted_back() == {"e": 1}
    to_e, to_c = debts.give_back(2)
    assert (to_e.creditor_id, to_e.message.blocks) == ("e", (3,))
    assert (to_c.creditor_id, to_c.message.blocks) == ("c", (6,))
    assert debts.free_blocks == 1
    assert sorted(debts.retries(), key=lambda one: one.creditor_id) == [to_c, to_e]
    assert [len(one.message.held) for one in debts.renewals(3.0)] == [1], "none that is only on its way back"
    debts.on_returned(to_e, BlocksReturned(generation=2))
    debts.on_returned(to_e, BlocksReturned(generation=2))
    debts.on_returned(to_c, BlocksReturned(generation=2))
    assert (debts.retries(), debts.wanted_back()) == ([], {})
    assert debts.borrowed_from() == {"c": 1}


def test_host_memory_is_returned_before_device_memory_without_pressure(debts: Debts) -> None:
    debts.on_granted(grant("c", 5), 0.0)
    debts.on_granted(grant("e", 3), 0.0)
    debts.on_granted(grant("c", 0, grant_id=2, tier=HOST), 0.0)
    assert debts.borrowed_from(HOST) == {"c": 1}
    assert debts.lenders() == [("c", DEVICE), ("c", HOST), ("e", DEVICE)]
    at_c, _ = debts.renewals(1.0)
    debts.on_renewed(at_c, renewed(1, 2, wanted_back=1), sent_s=1.0)
    (to_c,) = debts.give_back(1)
    assert (to_c.creditor_id, to_c.message.grant_id) == ("c", 1), "its device memory is what it lacks"
    (host,) = debts.give_back(1)
    assert (host.creditor_id, host.message.grant_id) == ("c", 2)
    debts.on_returned(host, BlocksReturned(generation=2))
    assert debts.wanted_back() == {"c": 1}, "host memory is no help"
    debts.on_returned(to_c, BlocksReturned(generation=2))
    assert debts.wanted_back() == {}


def test_frozen_blocks_stay_until_they_thaw_or_come_home(debts: Debts) -> None:
    debts.on_granted(grant("c", 5, 6), 0.0)
    first, second = debts.take(2)
    assert debts.used_at("c", DEVICE) == [first, second] and debts.used_at("c", HOST) == []
    debts.freeze([first, second])
    with pytest.raises(ValueError, match="in use"):
        debts.freeze([first])
    debts.release([first])
    assert debts.free_blocks == 0 and debts.used_at("c", DEVICE) == []
    (repayment,) = debts.recalled([second])
    assert repayment.message.blocks == (6,)
    debts.thaw([first, second])
    assert debts.free_blocks == 1
    assert debts.in_state(BlockState.RETURNING) == [second]


# --- settlements. With faults: tests/stack/test_settling_cores.py.


def settling_worker() -> tuple[Settling, Debts]:
    """A worker that owes `c` and is owed by `d`, with two bounce blocks."""
    grants, debts = Grants("w", 1, Terms(most_blocks=5), 10), Debts("w", 10, 1)
    grants.lend(borrow("d"), range(3), 0.0)
    debts.on_granted(grant("c", 20, 21, 22), 0.0)
    debts.take(3)
    settling = Settling(debts, grants)
    settling.bounce = [8, 9]
    return settling, debts


def step(phase: SettlePhase) -> Settle:
    return Settle(settlement="s", phase=phase, round=0, blocks=2, creditor_id="c", debtor_id="d")


def blocks_of(outcome: object) -> int:
    assert isinstance(outcome, Settled)
    return outcome.blocks


def copying(settling: Settling) -> None:
    assert blocks_of(settling.on_settle(step(SettlePhase.FREEZE), 0.0)) == 2
    assert settling.on_settle(step(SettlePhase.COPY), 1.0) == Copy(((10, 8), (11, 9)))


def test_a_settlement_from_freeze_to_unfreeze() -> None:
    settling, debts = settling_worker()
    frozen = settling.on_settle(step(SettlePhase.FREEZE), 0.0)
    assert isinstance(frozen, Settled) and (frozen.blocks, frozen.bounce_blocks) == (2, 2)
    copying(settling)
    settling.check_integrity()
    assert settling.on_copied(step(SettlePhase.COPY), whole=True).blocks == 2
    assert blocks_of(settling.on_settle(step(SettlePhase.COPY), 1.0)) == 2, "asked again"
    swap = settling.on_settle(step(SettlePhase.COMMIT), 2.0)
    assert isinstance(swap, Swap) and swap.pairs == ((10, 8), (11, 9)) and swap.answer.blocks == 2
    assert [one.message.blocks for one in swap.repayments] == [(20, 21)]
    assert blocks_of(settling.on_settle(step(SettlePhase.COMMIT), 2.0)) == 2, "asked again"
    assert settling.bounce == []
    settling.check_integrity()
    settling.on_settle(step(SettlePhase.UNFREEZE), 3.0)
    assert not settling.is_on
    assert debts.in_state(BlockState.RETURNING) == [10, 11]
    settling.check_integrity()


def test_incomplete_and_late_copies_do_not_count() -> None:
    settling, debts = settling_worker()
    copying(settling)
    assert settling.on_copied(step(SettlePhase.COPY), whole=False).blocks == 0
    assert blocks_of(settling.on_settle(step(SettlePhase.COMMIT), 1.0)) == 0
    settling.tick(5.9)
    assert len(debts.in_state(BlockState.FROZEN)) == 2
    settling.tick(6.0)
    assert len(debts.in_state(BlockState.USED)) == 3, "nobody has asked for five seconds"
    assert settling.on_copied(step(SettlePhase.COPY), whole=True).blocks == 0
    assert settling.bounce == [8, 9]
    settling.check_integrity()


def test_a_sequence_that_ends_meanwhile_leaves_its_copy_as_a_bounce_block() -> None:
    settling, debts = settling_worker()
    copying(settling)
    settling.on_copied(step(SettlePhase.COPY), whole=True)
    debts.release([10])
    swap = settling.on_settle(step(SettlePhase.COMMIT), 0.0)
    assert isinstance(swap, Swap) and swap.pairs == ((11, 9),)
    assert settling.bounce == [8]
    settling.check_integrity()


# --- how much to borrow and return

EMPTY = Capacity(total_blocks=10, free_blocks=10)
MARKS = Marks(4, 12)


def balance_of(own_free: int, borrowed_free: int = 0, wanted: int = 0, marks: Marks = MARKS) -> Balance:
    """A worker whose borrowed blocks have all been reported."""
    balance = Balance(marks, EMPTY)
    free_blocks = own_free + borrowed_free
    balance.on_report(Capacity(total_blocks=200, free_blocks=free_blocks, borrowed_free_blocks=borrowed_free))
    balance.wanted_blocks = wanted
    return balance


@pytest.mark.parametrize(
    ("own", "borrowed", "wanted", "lacks", "spares"),
    [
        *((4, 0, 0, 0, 0), (3, 0, 0, 5, 0), (1, 2, 0, 5, 0), (10, 0, 30, 28, 0)),
        *((10, 2, 0, 0, 0), (10, 5, 0, 0, 3), (99, 5, 0, 0, 5)),
    ],
)
def test_it_borrows_up_to_the_middle_and_returns_above_the_high_mark(
    own: int, borrowed: int, wanted: int, lacks: int, spares: int
) -> None:
    balance = balance_of(own, borrowed, wanted)
    assert (balance.lacks(0, 0), balance.spares(0, 0, 0)) == (lacks, spares)


def test_a_creditor_in_need_gets_more_but_not_below_the_low_mark() -> None:
    assert balance_of(3, 5).spares(0, 0, wanted_back_blocks=9) == 4


@given(
    own=st.integers(0, 100),
    borrowed=st.integers(0, 100),
    wanted=st.integers(0, 100),
    low=st.integers(0, 50),
    gap=st.integers(0, 50),
)
def test_blocks_just_borrowed_are_not_returned(
    own: int, borrowed: int, wanted: int, low: int, gap: int
) -> None:
    balance = balance_of(own, borrowed, wanted, Marks(low, low + gap))
    more = balance.lacks(0, 0)
    assert balance.lacks(0, more) == 0
    assert not more or balance.spares(0, more, 0) == 0
    back = balance.spares(0, 0, 1000)
    assert 0 <= back <= borrowed
    assert balance.lacks(0, -back) == 0 or back == 0


def gathering(needed_blocks: int, capacity: Capacity) -> Balance:
    balance = Balance(Marks(0, 0), EMPTY)
    balance.needed_blocks = needed_blocks
    balance.on_report(capacity)
    return balance


def test_the_lack_depends_on_the_pools_size_and_on_grants_since_the_report() -> None:
    assert gathering(16, EMPTY).lacks(0, 0) == 6
    assert gathering(16, Capacity(total_blocks=10, free_blocks=3)).lacks(0, 0) == 6
    assert gathering(0, EMPTY).lacks(0, 0) == 0
    assert gathering(16, EMPTY).lacks(4, 0) == 2
    assert gathering(16, EMPTY).lacks(6, 0) == 0
    balance = gathering(16, EMPTY)
    assert (balance.wanted_blocks, balance.own_blocks, balance.keep_blocks) == (16, 10, 16)
    assert balance.short_blocks == 6


def test_blocks_given_up_wait_for_a_report_before_more_are() -> None:
    grown = Capacity(total_blocks=20, free_blocks=20, borrowed_blocks=10, borrowed_free_blocks=10)
    balance = gathering(16, grown)
    assert balance.may_shrink() and balance.spares(10, 0, 0) == 4
    balance.on_shrunk()
    assert not balance.may_shrink()
    balance.on_report(grown)
    assert not balance.may_shrink(), "this report may be older"
    balance.on_report(Capacity(total_blocks=16, free_blocks=16, borrowed_blocks=6, borrowed_free_blocks=6))
    assert balance.may_shrink() and balance.spares(6, 0, 0) == 0


def test_without_borrowing_ahead_only_a_long_sequence_borrows() -> None:
    balance = Balance(Marks(2, 4), EMPTY)
    balance.on_report(Capacity(total_blocks=10, free_blocks=1))
    assert balance.lacks(0, 0) == 2
    balance.may_borrow_ahead = False
    assert balance.lacks(0, 0) == 0
    balance.needed_blocks = 16
    balance.on_report(Capacity(total_blocks=10, free_blocks=1))
    assert balance.lacks(0, 0) >= 6


def test_device_memory_that_is_lacked_comes_home_first_then_host_memory_then_by_pressure() -> None:
    under = {
        "a": CreditorPressure(2),
        "b": CreditorPressure(free_fraction=0.1),
        "c": CreditorPressure(free_fraction=0.9),
        "d": CreditorPressure(free_fraction=0.9, distance=1),
    }
    order = [
        ("a", DEVICE),
        ("b", HOST),
        ("c", HOST),
        ("a", HOST),
        ("b", DEVICE),
        ("d", DEVICE),
        ("c", DEVICE),
    ]
    assert in_order(sorted(order), under) == order


def test_pressure_comes_from_heartbeats() -> None:
    neighbours = Neighbours("w0")
    neighbours.hear(report("w0", host="a"), 0.0)
    neighbours.hear(report("w1", host="a", free=5, total=20), 0.0)
    neighbours.hear(report("w2", host="b", free=20, total=20), 0.0)
    assert pressures(neighbours, "a", {"w2": 3, "w3": 1}) == {
        "w1": CreditorPressure(free_fraction=0.25, distance=0),
        "w2": CreditorPressure(short_blocks=3, free_fraction=1.0, distance=1),
        "w3": CreditorPressure(short_blocks=1),
    }
