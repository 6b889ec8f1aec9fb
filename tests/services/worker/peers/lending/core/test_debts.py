"""The debtor: the rBlock table, leases from the time of sending, blocks in use, returns, losses."""

from collections.abc import Iterator

import pytest

from services.worker.peers.lending.core.debts import Debts
from services.worker.peers.lending.core.table import BlockPlace, BlockState, GrantKey, LentRow, RBlockTable
from shared.messages.lending import BlocksReturned, HeldGrant, KvTier, LeasesRenewed
from tests.services.worker.peers.lending.builders import grant


@pytest.fixture
def table() -> Iterator[RBlockTable]:
    made = RBlockTable("d", 10)
    yield made
    made.check_integrity()


@pytest.fixture
def debts(table: RBlockTable) -> Iterator[Debts]:
    made = Debts(table, incarnation=1)
    yield made
    made.check_integrity()


def renewed(*grants: int, incarnation: int = 1, wanted_back: int = 0) -> LeasesRenewed:
    held = tuple(HeldGrant(grant_id=grant_id, generation=2) for grant_id in grants)
    return LeasesRenewed(
        creditor_incarnation=incarnation, lease_s=4.0, held=held, wanted_back_blocks=wanted_back
    )


def test_blocks_are_taken_oldest_first_and_released(debts: Debts, table: RBlockTable) -> None:
    assert debts.on_granted(grant("c", 5, 6), 0.0) == [10, 11]
    assert debts.on_granted(grant("c", 5, 6), 0.0) == [], "known already"
    assert debts.take(1) == [10]
    with pytest.raises(ValueError, match="1 free"):
        debts.take(2)
    debts.release([10])
    with pytest.raises(ValueError, match="not used"):
        debts.release([10])
    assert (debts.free_blocks, debts.borrowed_blocks) == (2, 2)


def test_leases_count_from_sending_and_renew_after_a_quarter(debts: Debts, table: RBlockTable) -> None:
    debts.on_granted(grant("c", 5), 0.0)
    debts.on_granted(grant("c", 6, grant_id=2), 0.5)
    assert debts.renewals(0.9) == []
    (due,) = debts.renewals(1.0)
    assert [held.grant_id for held in due.message.held] == [1, 2]
    assert debts.renewals(1.1) == [], "asked already"
    assert debts.on_renewed(due, renewed(1, 2), sent_s=1.0) == []
    assert table.generation(table.grants()[0]) == 2
    assert debts.tick(4.9) == []
    assert sorted(debts.tick(5.0)) == [10, 11]


def test_grants_unknown_to_the_creditor_are_lost(debts: Debts) -> None:
    debts.on_granted(grant("c", 5), 0.0)
    debts.on_granted(grant("c", 6, grant_id=2), 0.0)
    used = debts.take(2)
    (due,) = debts.renewals(1.0)
    assert debts.on_renewed(due, renewed(2), sent_s=1.0) == [used[0]]
    (due,) = debts.renewals(2.0)
    assert debts.on_renewed(due, renewed(2, incarnation=9), sent_s=2.0) == [used[1]]
    debts.release(used)


def test_a_lost_creditor_loses_its_blocks(debts: Debts) -> None:
    debts.on_granted(grant("c", 5), 0.0)
    debts.on_granted(grant("e", 5), 0.0)
    assert debts.on_creditor_gone("c") == [10]
    assert debts.borrowed_blocks == 1


def test_an_ended_grant_loses_no_other_grant(debts: Debts) -> None:
    debts.on_granted(grant("c", 5, 6), 0.0)
    debts.on_granted(grant("c", 7, grant_id=2), 0.0)
    assert debts.on_grant_over(GrantKey("c", 1, 2)) == [12]
    assert debts.on_grant_over(GrantKey("c", 1, 2)) == []
    assert debts.borrowed_blocks == 2


def test_returns_go_to_creditors_in_need_first_and_are_retried(debts: Debts, table: RBlockTable) -> None:
    debts.on_granted(grant("c", 5, 6), 0.0)
    debts.on_granted(grant("e", 3), 0.0)
    (_, at_e) = debts.renewals(1.0)
    debts.on_renewed(at_e, renewed(1, wanted_back=1), sent_s=1.0)
    assert debts.wanted_back_blocks() == 1
    to_e, to_c = debts.give_back(2)
    assert (to_e.creditor_id, to_e.message.blocks) == ("e", (3,))
    assert (to_c.creditor_id, to_c.message.blocks) == ("c", (6,))
    assert debts.free_blocks == 1
    assert sorted(debts.retries(), key=lambda one: one.creditor_id) == [to_c, to_e]
    debts.on_returned(to_e, BlocksReturned(generation=2))
    debts.on_returned(to_e, BlocksReturned(generation=2))
    debts.on_returned(to_c, BlocksReturned(generation=2))
    assert (debts.retries(), debts.wanted_back_blocks()) == ([], 0)
    assert table.borrowed_from() == {"c": 1}


def test_host_memory_is_returned_before_device_memory_without_pressure(
    debts: Debts, table: RBlockTable
) -> None:
    debts.on_granted(grant("c", 5), 0.0)
    debts.on_granted(grant("e", 3), 0.0)
    debts.on_granted(grant("c", 0, grant_id=2, tier=KvTier.HOST), 0.0)
    assert table.borrowed_from(KvTier.HOST) == {"c": 1}
    assert table.lenders() == [("c", KvTier.DEVICE), ("c", KvTier.HOST), ("e", KvTier.DEVICE)]
    at_c, _ = debts.renewals(1.0)
    debts.on_renewed(at_c, renewed(1, 2, wanted_back=1), sent_s=1.0)
    (to_c,) = debts.give_back(1)
    assert (to_c.creditor_id, to_c.message.grant_id) == ("c", 1), "its device memory is what it lacks"
    (host,) = debts.give_back(1)
    assert (host.creditor_id, host.message.grant_id) == ("c", 2)
    debts.on_returned(host, BlocksReturned(generation=2))
    assert debts.wanted_back_blocks() == 1, "host memory is no help"
    debts.on_returned(to_c, BlocksReturned(generation=2))
    assert debts.wanted_back_blocks() == 0


def test_grants_that_are_only_on_the_way_back_are_not_renewed(debts: Debts) -> None:
    debts.on_granted(grant("c", 5), 0.0)
    debts.give_back(1)
    assert debts.renewals(3.0) == []


def test_frozen_blocks_stay_until_they_thaw_or_come_home(debts: Debts, table: RBlockTable) -> None:
    debts.on_granted(grant("c", 5, 6), 0.0)
    first, second = debts.take(2)
    debts.freeze([first, second])
    with pytest.raises(ValueError, match="in use"):
        debts.freeze([first])
    debts.release([first])
    assert debts.free_blocks == 0
    (repayment,) = debts.recalled([second])
    assert repayment.message.blocks == (6,)
    debts.thaw([first, second])
    assert debts.free_blocks == 1
    assert table.in_state(BlockState.RETURNING) == [second]


KEY = GrantKey("c", 1, 1)


def test_own_blocks_map_to_themselves_and_borrowed_ones_to_a_creditor() -> None:
    table = RBlockTable("w", 10)
    assert table.resolve(3) == BlockPlace("w", KvTier.DEVICE, 3)
    assert table.add(grant("c", 7, 9)) == [10, 11]
    assert table.resolve(11) == BlockPlace("c", KvTier.DEVICE, 9, KEY)
    assert (table.resolve(9).worker_id, table.resolve(10).worker_id) == ("w", "c")
    assert table.borrowed_from() == {"c": 2}
    table.check_integrity()


def test_borrowed_blocks_are_numbered_after_all_own_ids() -> None:
    """With Pie there are more ids than device blocks: the first borrowed block stopped a worker."""
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
