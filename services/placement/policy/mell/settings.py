"""Size classes and settings of MELL."""

from dataclasses import dataclass
from enum import IntEnum


class SizeClass(IntEnum):
    """Size class of an item relative to its worker's capacity. A GPU's category is its largest item's."""

    TINY = 0
    SMALL = 1
    MEDIUM = 2
    LARGE = 3


WEIGHT_SIXTHS = (0, 2, 3, 6)
"""Weight of an item by class (Lemma 2.1), in sixths of a GPU. A GPU of weight 6 is complete."""
COMPLETE_SIXTHS = 6


def class_of(blocks: int, capacity: int) -> SizeClass:
    """Return L for (C/2, C], M for (C/3, C/2], S for (C/4, C/3], else T."""
    if 2 * blocks > capacity:
        return SizeClass.LARGE
    if 3 * blocks > capacity:
        return SizeClass.MEDIUM
    return SizeClass.SMALL if 4 * blocks > capacity else SizeClass.TINY


def is_crumb(blocks: int, capacity: int) -> bool:
    """Return whether a request is so small that it is bundled: at most C/8."""
    return 8 * blocks <= capacity


@dataclass(frozen=True, slots=True)
class MellSettings:
    """Settings of MELL. Shares are of one worker's capacity, or of that of all active workers."""

    headroom_share: float = 0.035
    """Share left free for growth on the target of a repair. Evictions and arrivals may use it."""
    dense_share: float = 0.93
    """Utilization of active memory above which only unavoidable moves happen: see `repairs.py`."""
    repair_share: float = 0.80
    """Utilization below which Theorem 1 is restored; above 3/4 Theorem 2 holds by volume alone."""
    free_weight: float = 1.0
    """Priority of a target per share of free memory."""
    requests_weight: float = 0.01
    """Penalty of a target per request on it."""
    distance_weight: float = 0.05
    """Penalty of a target by distance: 0 on the same host, once on the same switch, twice elsewhere."""
    candidates: int = 3
    """Number of GPUs with most free memory that are compared, per category."""
    evacuation_items: int = 8
    """Maximum items on a GPU that is emptied if all fit elsewhere; 0 disables this."""
    max_moves: int = 10
    """Maximum moves per operation, a bundle counting once (Theorem 3). Further repairs wait."""


EAGER = MellSettings(headroom_share=0.0, dense_share=1.0, repair_share=1.0)
"""The paper's behaviour: every property is restored at once, regardless of the number of moves."""
