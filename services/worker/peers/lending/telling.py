"""What a worker tells of its loans: in heartbeats, and to people. Pure."""

from typing import Any

import msgspec

from services.worker.peers.lending.core.grants import Grants
from services.worker.peers.lending.core.table import RBlockTable
from shared.messages.lending import KvTier
from shared.messages.reports import Capacity


def section(
    capacity: Capacity, table: RBlockTable, grants: Grants, spare_blocks: int, host_free_blocks: int
) -> dict[str, Any]:
    """Of the heartbeat (`WorkerReported`): what is lent and borrowed, by tier. `spare_blocks` of the device
    could be lent, were there no cap."""
    device, host, terms = KvTier.DEVICE, KvTier.HOST, grants.terms
    room_blocks = terms.most_blocks - table.lent_blocks(device)
    own = msgspec.structs.replace(
        capacity,
        lent_blocks=table.lent_blocks(device),
        borrowed_blocks=sum(table.borrowed_from().values()),
        most_lent_blocks=terms.most_blocks + terms.most_host_blocks,
        lendable_blocks=0 if grants.frozen else max(0, min(spare_blocks, room_blocks)),
        host_blocks=table.host_blocks,
        host_lent_blocks=table.lent_blocks(host),
        host_lendable_blocks=0 if grants.frozen else host_free_blocks,
    )
    return {
        "capacity": own,
        "lent_to_blocks": table.lent_to(device),
        "borrowed_from_blocks": table.borrowed_from(device),
        "host_lent_to_blocks": table.lent_to(host),
        "host_borrowed_from_blocks": table.borrowed_from(host),
    }


def loans(table: RBlockTable) -> dict[str, object]:
    """For `python -m services status`: of both tiers, and how much of that is host memory."""
    lent_to, borrowed_from = table.lent_to(), table.borrowed_from()
    rows = [
        {"peer": peer, "lent_blocks": lent_to.get(peer, 0), "borrowed_blocks": borrowed_from.get(peer, 0)}
        for peer in sorted({*lent_to, *borrowed_from})
    ]
    return {
        "lent_blocks": table.lent_blocks(),
        "borrowed_blocks": sum(borrowed_from.values()),
        "host_lent_blocks": table.lent_blocks(KvTier.HOST),
        "host_borrowed_blocks": sum(table.borrowed_from(KvTier.HOST).values()),
        "loans": rows,
    }
