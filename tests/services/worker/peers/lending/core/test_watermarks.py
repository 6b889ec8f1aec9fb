"""How much a worker borrows and returns although reports are late, and whose blocks go home first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.peers.core.neighbours import Neighbours
from services.worker.peers.lending.core.repayment import CreditorPressure, in_order, pressures, recalls
from services.worker.peers.lending.core.watermarks import (
    Balance,
    Marks,
    Memory,
    blocks_to_borrow,
    blocks_to_return,
)
from shared.messages.lending import KvTier
from shared.messages.reports import Capacity
from tests.services.ledger.builders import report

MARKS = Marks(low_blocks=4, high_blocks=12)


def test_below_the_low_mark_it_borrows_up_to_the_middle() -> None:
    assert blocks_to_borrow(Memory(own_free=4), MARKS) == 0
    assert blocks_to_borrow(Memory(own_free=3), MARKS) == 5
    assert blocks_to_borrow(Memory(own_free=1, borrowed_free=2), MARKS) == 5
    assert blocks_to_borrow(Memory(own_free=10, wanted=30), MARKS) == 28


def test_above_the_high_mark_unused_blocks_are_returned() -> None:
    assert blocks_to_return(Memory(own_free=10, borrowed_free=2), MARKS) == 0
    assert blocks_to_return(Memory(own_free=10, borrowed_free=5), MARKS) == 3
    assert blocks_to_return(Memory(own_free=99, borrowed_free=5), MARKS) == 5


def test_a_creditor_in_need_gets_more_but_not_below_the_low_mark() -> None:
    assert blocks_to_return(Memory(own_free=3, borrowed_free=5), MARKS, wanted_back_blocks=9) == 4


def test_marks_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match="above"):
        Marks(5, 4)


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
    marks, memory = Marks(low, low + gap), Memory(own, borrowed, wanted)
    more = blocks_to_borrow(memory, marks)
    after = Memory(own, borrowed + more, wanted)
    assert blocks_to_borrow(after, marks) == 0
    assert not more or blocks_to_return(after, marks) == 0
    back = blocks_to_return(memory, marks, wanted_back_blocks=1000)
    assert 0 <= back <= borrowed
    assert blocks_to_borrow(Memory(own, borrowed - back, wanted), marks) == 0 or back == 0


EMPTY = Capacity(total_blocks=10, free_blocks=10)


def gathering(needed_blocks: int, capacity: Capacity) -> Balance:
    balance = Balance(Marks(0, 0), EMPTY)
    balance.needed_blocks = needed_blocks
    balance.on_report(capacity)
    return balance


def test_the_lack_depends_on_the_pools_size_and_not_on_its_use() -> None:
    assert gathering(16, EMPTY).lacks(0, 0) == 6
    assert gathering(16, Capacity(total_blocks=10, free_blocks=3)).lacks(0, 0) == 6
    assert gathering(0, EMPTY).lacks(0, 0) == 0


def test_blocks_granted_since_the_report_are_not_borrowed_again() -> None:
    assert gathering(16, EMPTY).lacks(4, 0) == 2
    assert gathering(16, EMPTY).lacks(6, 0) == 0


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


def test_memory_for_a_long_sequence_stops_recalls_and_is_wanted_back() -> None:
    balance = gathering(16, Capacity(total_blocks=10, free_blocks=10))
    assert (balance.wanted_blocks, balance.own_blocks, balance.keep_blocks) == (16, 10, 16)
    assert balance.short_blocks == 6


def test_the_creditor_under_most_pressure_comes_first() -> None:
    under = {
        "a": CreditorPressure(free_fraction=0.5),
        "b": CreditorPressure(free_fraction=0.1),
        "c": CreditorPressure(3, 0.9),
    }
    found = recalls({"a": 4, "b": 4, "c": 2}, under, free_blocks=9, keep_blocks=2)
    assert found == {"c": 2, "b": 4, "a": 1}


def test_host_memory_comes_before_device_memory_without_pressure() -> None:
    device, host = KvTier.DEVICE, KvTier.HOST
    under = {
        "a": CreditorPressure(2),
        "b": CreditorPressure(free_fraction=0.1),
        "c": CreditorPressure(free_fraction=0.9),
    }
    lenders = [("b", device), ("c", host), ("a", device), ("a", host), ("b", host)]
    assert in_order(lenders, under) == [
        ("a", device),
        ("b", host),
        ("c", host),
        ("a", host),
        ("b", device),
    ]


def test_distant_creditors_come_first_and_nothing_without_room() -> None:
    under = {"a": CreditorPressure(distance=0), "b": CreditorPressure(distance=1)}
    assert recalls({"a": 4, "b": 4}, under, free_blocks=5, keep_blocks=0) == {"b": 4, "a": 1}
    assert recalls({"a": 4}, {}, free_blocks=2, keep_blocks=2) == {}


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
