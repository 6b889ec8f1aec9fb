"""What an operator may set of MELL."""

from dataclasses import dataclass
from enum import IntEnum


class SizeClass(IntEnum):
    """How large an item is, of its worker's capacity; also a GPU's category, after its largest item."""

    TINY = 0
    SMALL = 1
    MEDIUM = 2
    LARGE = 3


WEIGHT_SIXTHS = (0, 2, 3, 6)
"""By class: what an item counts in Lemma 2.1. A GPU that weighs a whole (6) is complete."""
COMPLETE_SIXTHS = 6


def class_of(blocks: int, capacity: int) -> SizeClass:
    """L (C/2, C], M (C/3, C/2], S (C/4, C/3], T: the rest."""
    if 2 * blocks > capacity:
        return SizeClass.LARGE
    if 3 * blocks > capacity:
        return SizeClass.MEDIUM
    return SizeClass.SMALL if 4 * blocks > capacity else SizeClass.TINY


def is_crumb(blocks: int, capacity: int) -> bool:
    """Too small to stand alone: at most C/8."""
    return 8 * blocks <= capacity


@dataclass(frozen=True, slots=True)
class MellSettings:
    """What an operator may set. Shares are of a worker's capacity, or of all active workers' together."""

    headroom_share: float = 0.035
    """Left free for growth on the target of a repair. What has to move, or arrives, takes any room."""
    dense_share: float = 0.93
    """While so much of the active memory is in use nothing moves but what has to: see `repairs.py`."""
    repair_share: float = 0.80
    """Below this Theorem 1's properties are restored; above 3/4 Theorem 2 holds by volume alone."""
    free_weight: float = 1.0
    """Priority of a target: by its share of free memory."""
    requests_weight: float = 0.01
    """Priority of a target: against it, by request on it."""
    distance_weight: float = 0.05
    """Priority of a target: against it; 0 on the same host, once on the same switch, twice elsewhere."""
    candidates: int = 3
    """Of each category, how many targets are compared: the roomiest."""
    evacuation_items: int = 8
    """A GPU with at most so many items is emptied when all of them fit elsewhere; 0: never."""
    max_moves: int = 10
    """Of one operation, bundles once (Theorem 3). Repairs that would need more wait for the next."""


EAGER = MellSettings(headroom_share=0.0, dense_share=1.0, repair_share=1.0)
"""The paper's own behaviour: every property is restored at once, whatever it costs in moves."""
