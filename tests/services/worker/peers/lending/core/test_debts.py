"""The debtor: the search for a creditor, borrowed blocks and leases, what it borrows and returns.

Its part in a settlement: `../test_service.py`, and `tests/stack/test_settling_cores.py` under faults."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.peers.core.neighbours import Neighbours
from services.worker.peers.lending.core.borrowing import (
    AskCreditor,
    Balance,
    Borrowing,
    CreditorPressure,
    CreditorQuestion,
    Marks,
    in_order,
    is_answer,
    pressures,
)
from services.worker.peers.lending.core.debts import BlockState, Borrowed, Debts, GrantKey
from shared.messages.commands import CreditorCandidate, CreditorCandidates, FindCreditors
from shared.messages.lending import (
    BlocksReturned,
    BorrowReply,
    Grant,
    HeldGrant,
    KvTier,
    LeasesRenewed,
    Refusal,
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


# --- how much to borrow and return

EMPTY = Capacity(total_blocks=10, free_blocks=10)
MARKS, ZERO = Marks(4, 12), Marks(0, 0)


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


def gathering(
    needed_blocks: int, free: int = 10, total: int = 10, borrowed: int = 0, marks: Marks = ZERO
) -> Balance:
    """A worker one of whose sequences needs so many blocks; all that it has borrowed is free."""
    balance = Balance(marks, EMPTY)
    balance.needed_blocks = needed_blocks
    balance.on_report(capacity(free, total, borrowed))
    return balance


def capacity(free: int, total: int, borrowed: int = 0) -> Capacity:
    return Capacity(
        total_blocks=total, free_blocks=free, borrowed_blocks=borrowed, borrowed_free_blocks=borrowed
    )


def test_the_lack_depends_on_the_pools_size_and_on_grants_since_the_report() -> None:
    lacks = [gathering(16).lacks(granted, 0) for granted in (0, 4, 6)]
    assert lacks == [6, 2, 0]
    assert gathering(16, free=3).lacks(0, 0) == 6 and gathering(0).lacks(0, 0) == 0
    balance = gathering(16)
    assert (balance.wanted_blocks, balance.own_blocks, balance.keep_blocks) == (16, 10, 16)
    assert balance.short_blocks == 6


def test_blocks_given_up_wait_for_a_report_before_more_are() -> None:
    balance = gathering(16, 20, 20, borrowed=10)
    assert balance.may_shrink() and balance.spares(10, 0, 0) == 4
    balance.on_shrunk()
    assert not balance.may_shrink()
    balance.on_report(capacity(20, 20, 10))
    assert not balance.may_shrink(), "this report may be older"
    balance.on_report(capacity(16, 16, 6))
    assert balance.may_shrink() and balance.spares(6, 0, 0) == 0


def test_without_borrowing_ahead_only_a_long_sequence_borrows() -> None:
    balance = gathering(0, free=1, marks=Marks(2, 4))
    assert balance.lacks(0, 0) == 2
    balance.may_borrow_ahead = False
    assert balance.lacks(0, 0) == 0
    balance.needed_blocks = 16
    balance.on_report(capacity(1, 10))
    assert balance.lacks(0, 0) >= 6


def test_device_memory_that_is_lacked_comes_home_first_then_host_memory_then_by_pressure() -> None:
    under = {"a": CreditorPressure(2), "b": CreditorPressure(free_fraction=0.1)}
    under |= {name: CreditorPressure(free_fraction=0.9, distance=far) for name, far in (("c", 0), ("d", 1))}
    order = list(zip("abcabdc", (DEVICE, HOST, HOST, HOST, DEVICE, DEVICE, DEVICE), strict=True))
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


NO = BorrowReply(refusal=Refusal.AT_CAP)


def candidates(*names: str | tuple[str, KvTier], free_tokens: int = 1) -> CreditorCandidates:
    named = [(each, KvTier.DEVICE) if isinstance(each, str) else each for each in names]
    how = {"free_tokens": free_tokens, "distance": 0}
    found = tuple(CreditorCandidate(worker_id=name, tier=tier, **how) for name, tier in named)
    return CreditorCandidates(candidates=found)


def lends(blocks: int) -> BorrowReply:
    return BorrowReply(grant=grant("c", *range(blocks)))


def asks(question: CreditorQuestion | None) -> tuple[str, int]:
    assert isinstance(question, AskCreditor)
    return question.creditor_id, question.question.blocks


def test_candidates_are_asked_in_order_until_one_grants() -> None:
    search = Borrowing("d", 1, block_tokens=16)
    asked = search.start(4)
    assert isinstance(asked, FindCreditors) and asked.tokens == 64
    assert asks(search.on_candidates(candidates("d", "a", "b"), 0.0)) == ("a", 4)
    assert asks(search.on_reply("a", NO, 0.0)) == ("b", 4)
    assert search.on_reply("b", lends(4), 0.0) is None
    assert search.may_start(0.0)
    search.check_integrity()


def test_a_search_for_a_cache_asks_for_host_memory_only() -> None:
    requests = itertools.count(1)
    sequences = Borrowing("d", 1, 16, requests=requests)
    search = Borrowing("d", 1, 16, requests=requests, for_cache=True)
    sequences.start(1)
    first = sequences.on_candidates(candidates("a"), 0.0)
    asked = search.start(4)
    assert isinstance(asked, FindCreditors) and asked.for_cache
    question = search.on_candidates(candidates("a", ("b", KvTier.HOST), free_tokens=64), 0.0)
    assert isinstance(question, AskCreditor) and question.creditor_id == "b"
    assert question.question.for_cache and question.question.tier is KvTier.HOST
    assert isinstance(first, AskCreditor) and not first.question.for_cache
    assert (first.question.request, question.question.request) == (1, 2)


def test_after_refusals_the_ledger_is_asked_again_and_told_of_them() -> None:
    search = Borrowing("d", 1, 16, most_rounds=2, rest_s=1.0)
    search.start(4)
    search.on_candidates(candidates("a", "b", "c"), 0.0)
    search.on_reply("a", NO, 0.0)
    search.on_reply("b", None, 0.0)
    again = search.on_reply("c", NO, 0.0)
    assert isinstance(again, FindCreditors) and again.refused_by == ("a", "b", "c")
    assert asks(search.on_candidates(candidates("e"), 0.0)) == ("e", 4)
    assert search.on_reply("e", NO, 5.0) is None
    assert (search.may_start(5.9), search.may_start(6.0)) == (False, True)


def test_each_candidate_is_asked_for_the_tier_that_the_ledger_names() -> None:
    search = Borrowing("d", 1, 16)
    search.start(4)
    named = [("a", KvTier.DEVICE), ("a", KvTier.HOST), ("b", KvTier.HOST)]
    question = search.on_candidates(candidates(*named), 0.0)
    for name, tier in named:
        assert isinstance(question, AskCreditor)
        assert (question.creditor_id, question.question.tier) == (name, tier)
        question = search.on_reply(name, lends(1) if tier is KvTier.HOST and name == "a" else NO, 0.0)
    assert isinstance(question, FindCreditors) and question.tokens == 3 * 16
    assert (question.refused_by, question.refused_host_by) == (("a",), ("a", "b"))


def test_a_search_without_candidates_or_a_ledger_rests() -> None:
    search = Borrowing("d", 1, 16)
    search.start(4)
    with pytest.raises(ValueError, match="looked for"):
        search.start(1)
    assert search.on_candidates(candidates(), 1.0) is None
    assert not search.may_start(1.0)
    search.start(4)
    search.on_no_ledger(2.0)
    assert search.may_start(2.5)


@given(
    wanted=st.integers(1, 20),
    offers=st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=3), min_size=1, max_size=6),
    grants=st.lists(st.integers(0, 8), max_size=40),
)
def test_any_search_ends_and_takes_at_most_what_is_wanted(
    wanted: int, offers: list[list[str]], grants: list[int]
) -> None:
    search = Borrowing("d", 1, 16)
    question: CreditorQuestion | None = search.start(wanted)
    got, asked, requests = 0, 0, []
    while question is not None:
        asked += 1
        assert asked < 100
        if isinstance(question, FindCreditors):
            question = search.on_candidates(candidates(*offers.pop() if offers else []), 0.0)
        else:
            requests.append(question.question.request)
            most = question.question.blocks
            granted = min(most, grants.pop() if grants else 0)
            got += granted
            question = search.on_reply(question.creditor_id, lends(granted) if granted else NO, 0.0)
        search.check_integrity()
    assert got <= wanted and search.may_start(1.0)
    assert len(set(requests)) == len(requests)


UNFIT = [grant("w", 4), grant("c9", 4), grant("c1", 4, tier=KvTier.HOST)]
UNFIT += [grant("c1", *blocks) for blocks in ((4, 4), (-1,), (4, 5, 6, 7), ())]
UNFIT += [grant("c1", 4, lease_s=lease_s) for lease_s in (float("nan"), -1.0)]


@pytest.mark.parametrize("granted", UNFIT)
def test_a_grant_that_does_not_fit_the_request_is_ignored(granted: Grant) -> None:
    """A grant of own memory stopped the debtor; a repeated block would hold two sequences."""
    asked = borrow("w", blocks=3)
    assert not is_answer(granted, AskCreditor("c1", asked))
    assert is_answer(grant("c1", 4, 5), AskCreditor("c1", asked))
