"""Bins for token counts: exact up to 64, then 32 to an octave, so an edge is off by at most 3 %.

Bin i covers the lengths [LOWER[i], UPPER[i]], both included; the last one covers everything above.
"""

import numpy as np
import numpy.typing as npt

EXACT_TOKENS = 64
_PER_OCTAVE = 32
_OCTAVES = 14
"""Up to 64·2^14 ≈ one million tokens."""


def _upper_edges() -> npt.NDArray[np.int64]:
    edges = list(range(1, EXACT_TOKENS + 1))
    for octave in range(_OCTAVES):
        start, width = EXACT_TOKENS << octave, (EXACT_TOKENS << octave) // _PER_OCTAVE
        edges += [start + width * (step + 1) for step in range(_PER_OCTAVE)]
    return np.array(edges, dtype=np.int64)


UPPER: npt.NDArray[np.int64] = _upper_edges()
LOWER: npt.NDArray[np.int64] = np.concatenate([np.array([1], dtype=np.int64), UPPER[:-1] + 1])
COUNT = len(UPPER)


def bin_of(tokens: int) -> int:
    """Index of the bin that holds `tokens`; below 1 counts as 1, beyond the last edge as the last bin."""
    return min(int(np.searchsorted(UPPER, max(1, tokens))), COUNT - 1)
