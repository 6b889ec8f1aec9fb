"""What heartbeats and status say of loans, by tier."""

import msgspec

from services.worker.peers.lending.core.grants import Grants, Terms
from services.worker.peers.lending.core.table import LentRow, RBlockTable
from services.worker.peers.lending.telling import loans, section
from shared.messages.lending import KvTier
from tests.services.ledger.core.test_debt_ledger import report
from tests.services.worker.peers.lending.builders import grant


def test_tiers_are_told_apart_and_frozen_workers_lend_nothing() -> None:
    table = RBlockTable("w", 20, 5)
    grants = Grants(table, 1, Terms(6, most_host_blocks=5))
    table.add(grant("c", 1, 2))
    table.add(grant("c", 1, grant_id=2, tier=KvTier.HOST))
    table.lend(KvTier.DEVICE, [3, 4], LentRow("d", 1))
    table.lend(KvTier.HOST, [0, 1, 2], LentRow("e", 2))
    before = report("w")
    lent = section(before.capacity, table, grants, spare_blocks=9, host_free_blocks=2)
    told = msgspec.structs.replace(before, **lent)
    capacity = told.capacity
    assert (capacity.lent_blocks, capacity.host_lent_blocks, capacity.host_blocks) == (2, 3, 5)
    assert (capacity.lendable_blocks, capacity.host_lendable_blocks, capacity.loanable_blocks) == (4, 2, 6)
    assert (capacity.most_lent_blocks, capacity.borrowed_blocks) == (11, 3)
    assert (told.lent_to_blocks, told.host_lent_to_blocks) == ({"d": 2}, {"e": 3})
    assert (told.borrowed_from_blocks, told.host_borrowed_from_blocks) == ({"c": 2}, {"c": 1})
    grants.set_frozen_terms(frozen=True)
    assert section(before.capacity, table, grants, 9, 2)["capacity"].loanable_blocks == 0
    assert loans(table) == {
        "lent_blocks": 5,
        "borrowed_blocks": 3,
        "host_lent_blocks": 3,
        "host_borrowed_blocks": 1,
        "loans": [
            {"peer": "c", "lent_blocks": 0, "borrowed_blocks": 3},
            {"peer": "d", "lent_blocks": 2, "borrowed_blocks": 0},
            {"peer": "e", "lent_blocks": 3, "borrowed_blocks": 0},
        ],
    }
