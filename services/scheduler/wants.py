"""Who may borrow KV for a sequence that its worker's own cannot hold: the oldest first, all or nothing. Pure.

Two workers that each gather blocks for a long sequence, and each keep what they have, wait for each other for
ever. So who waits is told to gather only when its need fits beside the needs of all older ones, whatever else
is lent now; the others give back what they do not use, and their workers lend. Who gathers lends nothing.
The order is total and constant while a sequence lives, so the oldest always gets what it needs.
Knows what workers lend at most, not what they would lend now.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shared.messages.reports import Capacity
from shared.messages.sequence import SequenceKey


@dataclass(frozen=True, slots=True)
class Claim:
    """One sequence's need of its worker."""

    order: tuple[float, SequenceKey]
    worker_id: str
    blocks: int
    """All in all, those that the worker has among them."""


def who_may_borrow(claims: Iterable[Claim], capacities: Mapping[str, Capacity]) -> list[Claim]:
    """At most one for each worker, oldest first. The oldest of all is always among them."""
    chosen: dict[str, Claim] = {}
    for claim in sorted(claims, key=lambda one: one.order):
        together = {**chosen, claim.worker_id: _larger(claim, chosen.get(claim.worker_id))}
        if not chosen or _fit(together, capacities):
            chosen = together
        else:
            break  # younger and smaller ones would take what this one waits for
    return list(chosen.values())


def is_deprived(blocks: int, capacity: Capacity) -> bool:
    """A sequence of so many blocks is larger than the worker's own KV, as far as that is not lent."""
    return blocks > capacity.total_blocks - capacity.borrowed_blocks


def _larger(claim: Claim, other: Claim | None) -> Claim:
    return claim if other is None or claim.blocks > other.blocks else other


def _fit(claims: Mapping[str, Claim], capacities: Mapping[str, Capacity]) -> bool:
    missing = sum(
        max(0, claim.blocks - capacities[name].total_blocks + capacities[name].borrowed_blocks)
        for name, claim in claims.items()
    )
    lenders = (capacity for name, capacity in capacities.items() if name not in claims)
    return missing <= sum(capacity.most_lent_blocks for capacity in lenders)
