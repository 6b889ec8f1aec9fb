"""Size classes of MELL (papers/000 §VI-C), by integer comparison: no rounding.

T and larger stand alone; smaller requests are bundled into items of at most a quarter of a worker.
"""

from enum import IntEnum


class SizeClass(IntEnum):
    """Ordered by size; also the category of a GPU, after its largest item."""

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
