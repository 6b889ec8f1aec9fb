"""Which borrowed blocks a debtor with free memory should bring home. Pure.

Device memory of the creditor under most pressure first: it lacks it. Then host memory, which is the slower to
read and of no other use to its owner; then by pressure, and far ones before near ones of equal pressure,
since reading them costs more. Source: `algorithms.md` §4 (repayment).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from services.worker.peers.core.neighbours import Neighbours
from shared.messages.lending import KvTier


@dataclass(frozen=True, slots=True)
class CreditorPressure:
    """Of a creditor, as far as its debtor knows."""

    short_blocks: int = 0
    """It wants back so many, of its device memory."""
    free_fraction: float = 1.0
    """Of its own memory."""
    distance: int = 0


def in_order(
    lenders: Iterable[tuple[str, KvTier]], pressures: Mapping[str, CreditorPressure]
) -> list[tuple[str, KvTier]]:
    """Creditors' memory, by tier: what is to be brought home first comes first."""
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
    """Device blocks to recall by creditor, of `borrowed` (in use), into what is free beyond `keep_blocks`."""
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
    """By creditor, from what neighbours say of themselves; `wanted_back` in blocks."""
    found = {
        name: CreditorPressure(free_fraction=one.free_fraction, distance=int(one.host != own_host))
        for name, one in neighbours.items()
    }
    for name, blocks in wanted_back.items():
        found[name] = replace(found.get(name, CreditorPressure()), short_blocks=blocks)
    return found
