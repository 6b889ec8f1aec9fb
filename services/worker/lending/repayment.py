"""Which borrowed blocks a debtor with free memory should bring home. Pure.

From the creditor under most pressure first; far ones before near ones of equal pressure, since reading them
costs more. Source: `algorithms.md` §4 (repayment).
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pressure:
    """Of a creditor, as far as its debtor knows."""

    short_blocks: int = 0
    """It wants back so many."""
    free_fraction: float = 1.0
    """Of its own memory."""
    distance: int = 0


def recalls(
    borrowed: Mapping[str, int], pressures: Mapping[str, Pressure], free_blocks: int, keep_blocks: int
) -> dict[str, int]:
    """Blocks to recall by creditor, of `borrowed` (in use), into what is free beyond `keep_blocks`."""
    room = max(0, free_blocks - keep_blocks)
    nothing = Pressure()

    def rank(creditor: str) -> tuple[int, float, int, str]:
        pressure = pressures.get(creditor, nothing)
        return -pressure.short_blocks, pressure.free_fraction, -pressure.distance, creditor

    found: dict[str, int] = {}
    for creditor in sorted(borrowed, key=rank):
        blocks = min(borrowed[creditor], room)
        if blocks > 0:
            found[creditor] = blocks
            room -= blocks
    return found
