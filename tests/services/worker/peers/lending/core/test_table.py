"""The rBlock table: local and borrowed numbers, what is lent, contradictions refused."""

import pytest

from services.worker.peers.lending.core.table import BlockPlace, BlockState, GrantKey, LentRow, RBlockTable
from shared.messages.lending import KvTier
from tests.services.worker.peers.lending.builders import grant

KEY = GrantKey("c", 1, 1)


def test_local_blocks_mean_themselves_and_borrowed_ones_a_place_elsewhere() -> None:
    table = RBlockTable("w", 10)
    assert table.resolve(3) == BlockPlace("w", KvTier.DEVICE, 3)
    assert table.add(grant("c", 7, 9)) == [10, 11]
    assert table.resolve(11) == BlockPlace("c", KvTier.DEVICE, 9, KEY)
    assert (table.resolve(9).worker_id, table.resolve(10).worker_id) == ("w", "c")
    assert table.borrowed_from() == {"c": 2}
    table.check_integrity()


def test_borrowed_blocks_are_numbered_after_all_own_ones_on_the_device_or_not() -> None:
    """With Pie there are more ids than blocks of the device: a worker ended with the first it borrowed."""
    table = RBlockTable("w", 10, local_ids=15)
    assert table.resolve(14).worker_id == "w" and table.add(grant("c", 7, 9)) == [15, 16]
    assert table.own_blocks(KvTier.DEVICE) == 10, "of which some may be lent"
    table.check_integrity()


def test_a_grant_is_entered_once_and_forgotten_with_its_last_block() -> None:
    table = RBlockTable("w", 10)
    first, second = table.add(grant("c", 7, 9))
    with pytest.raises(ValueError, match="entered already"):
        table.add(grant("c", 1))
    with pytest.raises(ValueError, match="own"):
        table.add(grant("w", 1))
    table.set_generation(KEY, 3)
    table.set_generation(KEY, 2)
    assert table.generation(KEY) == 3, "late news do not turn the clock back"
    table.remove([first])
    assert table.of_grant(KEY) == [second]
    table.remove([second])
    assert table.grants() == []
    with pytest.raises(KeyError):
        table.resolve(second)
    assert table.add(grant("c", 7, grant_id=2)) == [12], "numbers are not used again"
    table.check_integrity()


def test_lent_blocks_are_counted_by_debtor_and_are_own_memory() -> None:
    table = RBlockTable("w", 10, host_blocks=100)
    (borrowed,) = table.add(grant("c", 7))
    table.lend(KvTier.DEVICE, [0, 1], LentRow("d", 1))
    table.lend(KvTier.HOST, [0, 99], LentRow("e", 2))
    assert table.lent_to() == {"d": 2, "e": 2}
    assert (table.lent_blocks(), table.lent_blocks(KvTier.HOST)) == (4, 2)
    for wrong in (1, borrowed, -1):
        with pytest.raises(ValueError, match="not this worker's"):
            table.lend(KvTier.DEVICE, [wrong], LentRow("e", 3))
    for wrong in (0, 100, -1):
        with pytest.raises(ValueError, match="not this worker's"):
            table.lend(KvTier.HOST, [wrong], LentRow("e", 3))
    assert (table.lent_to(KvTier.DEVICE), table.lent_to(KvTier.HOST)) == ({"d": 2}, {"e": 2})
    table.take_back(KvTier.DEVICE, [1])
    assert table.lent_row(KvTier.DEVICE, 1) is None
    with pytest.raises(KeyError):
        table.take_back(KvTier.DEVICE, [1])
    assert table.in_state(BlockState.FREE) == [borrowed]
    table.check_integrity()
