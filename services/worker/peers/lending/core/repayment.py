"""Which borrowed blocks a debtor with free memory brings home first. Pure.

First comes device memory of the creditor under most pressure, which lacks it. Then host memory, which is
slower to read and of no other use to its owner. Then by pressure; at equal pressure, distant creditors
first, since their blocks cost more to read. Source: `algorithms.md` §4 (repayment).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from services.worker.peers.core.neighbours import Neighbours
from shared.messages.lending import KvTier


@dataclass(frozen=True, slots=True)
class CreditorPressure:
    """Memory pressure of a creditor, as far as its debtor knows."""

    short_blocks: int = 0
    """Device blocks that it wants back."""
    free_fraction: float = 1.0
    """Share of its own memory that is free."""
    distance: int = 0


def in_order(
    lenders: Iterable[tuple[str, KvTier]], pressures: Mapping[str, CreditorPressure]
) -> list[tuple[str, KvTier]]:
    """Return creditors' memory, by tier, in the order in which to bring it home."""
    nothing = CreditorPressure()

    def rank(lender: tuple[str, KvTier]) -> tuple[int, bool, float, int, str]:
        creditor, tier = lender
        pressure = pressures.get(creditor, nothing)
        is_device = tier is KvTier.DEVICE
        short_blocks = pressure.short_blocks if is_device else 0
        return -short_blocks, is_device, pressure.free_fraction, -pressure.distance, creditor

    return sorted(lenders, key=rank)


def recalls(
    borrowed: Mapping[str, int], pressures: Mapping[str, CreditorPressure], free_blocks: int, keep_blocks: int
) -> dict[str, int]:
    """Return device blocks to recall by creditor: of those `borrowed` and in use, as many as fit."""
    room = max(0, free_blocks - keep_blocks)
    found: dict[str, int] = {}
    for creditor, _ in in_order(((creditor, KvTier.DEVICE) for creditor in borrowed), pressures):
        blocks = min(borrowed[creditor], room)
        if blocks > 0:
            found[creditor] = blocks
            room -= blocks
    return found


def pressures(
    neighbours: Neighbours, own_host: str, wanted_back: Mapping[str, int]
) -> dict[str, CreditorPressure]:
    """Return the pressure by creditor, from heartbeats and the blocks that creditors want back."""
    found = {
        name: CreditorPressure(free_fraction=one.free_fraction, distance=int(one.host != own_host))
        for name, one in neighbours.items()
    }
    for name, blocks in wanted_back.items():
        found[name] = replace(found.get(name, CreditorPressure()), short_blocks=blocks)
    return found
