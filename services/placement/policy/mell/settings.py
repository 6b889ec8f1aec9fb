"""Size classes and settings of MELL."""

from collections.abc import Iterable
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


def lower_bound(sizes: Iterable[int], capacity: int) -> int:
    """Return max(ceil(ΣS/C), #L + ceil(max(0, #M − #L)/2)): no packing of `sizes` uses fewer workers."""
    total = larges = mediums = 0
    for size in sizes:
        total += size
        size_class = class_of(size, capacity)
        larges += size_class == SizeClass.LARGE
        mediums += size_class == SizeClass.MEDIUM
    return max(-(-total // capacity), larges + -(-max(0, mediums - larges) // 2))


FREE_WEIGHT, REQUESTS_WEIGHT, DISTANCE_WEIGHT = 1.0, 0.01, 0.05
"""Priority of a target per share of free memory, less these per request on it and for another host."""
CANDIDATES = 3
"""Number of GPUs with most free memory that are compared, per category."""
EVACUATION_ITEMS = 8
"""Maximum items on a GPU that is emptied if all fit elsewhere."""
MAX_MOVES = 10
"""Maximum moves per operation, a bundle counting once (Theorem 3). Further repairs wait."""


@dataclass(frozen=True, slots=True)
class MellSettings:
    """How eagerly MELL repairs. Shares are of one worker's capacity, or of that of all active workers."""

    headroom_share: float = 0.035
    """Share left free for growth on the target of a repair. Evictions and arrivals may use it."""
    dense_share: float = 0.93
    """Utilization of active memory above which only unavoidable moves happen: see `repairs.py`."""
    repair_share: float = 0.80
    """Utilization below which Theorem 1 is restored; above 3/4 Theorem 2 holds by volume alone."""


EAGER = MellSettings(headroom_share=0.0, dense_share=1.0, repair_share=1.0)
"""The paper's behaviour: every property is restored at once, regardless of the number of moves."""
