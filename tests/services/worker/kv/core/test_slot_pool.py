"""Slots are conserved."""

import pytest

from services.worker.kv.core.block_manager import SlotPool
from services.worker.kv.core.eviction import Lru, ReuseHistory


def shelf_of(total: int) -> SlotPool:
    return SlotPool(total, Lru(ReuseHistory()))


def test_each_slot_is_taken_once() -> None:
    shelf = shelf_of(3)
    assert sorted([shelf.take() or 0, shelf.take() or 0, shelf.take() or 0]) == [0, 1, 2]
    assert shelf.take() is None
    shelf.give(1)
    shelf.check_integrity([0, 2])
    assert shelf.take() == 1


def test_certain_slots_can_be_claimed_once() -> None:
    shelf = shelf_of(5)
    shelf.claim([4, 0])
    shelf.check_integrity([0, 4])
    for wrong in ([0], [1, 1], [5]):
        with pytest.raises(ValueError, match="not free"):
            shelf.claim(wrong)
    shelf.check_integrity([0, 4])


def test_a_lost_slot_is_noticed() -> None:
    shelf = shelf_of(2)
    shelf.take()
    with pytest.raises(AssertionError, match="lost"):
        shelf.check_integrity([])


def test_a_tier_of_less_than_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        shelf_of(-1)
