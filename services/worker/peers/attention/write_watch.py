"""Records writes to borrowed blocks while they are copied home. Knows parts of steps; no link, no tensor."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from services.worker.engine.partition import ELSEWHERE, Part

Place = tuple[int, int]
"""A holder, and a block there."""


class WriteWatch:
    """Watch of one debtor, over its latest round of copies."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._copies: dict[Place, int] = {}

    def restart(self, copies: Mapping[Place, int]) -> None:
        """Start a round: own blocks by the place copied into them."""
        self._copies = dict(copies)

    def discard(self, own: Iterable[int]) -> None:
        """Forget copies that did not arrive."""
        missed = set(own)
        self._copies = {place: block for place, block in self._copies.items() if block not in missed}

    def is_copy(self, place: Place, own: int) -> bool:
        """Return whether the own block is a current copy of the place."""
        return self._copies.get(place) == own

    def on_step(self, parts: Sequence[Part]) -> None:
        """Drop the copies of blocks that a step writes to."""
        if not self._copies:
            return
        for part in parts:
            slots = part.spans.slots
            for block in np.unique(slots[slots != ELSEWHERE] // self._block_tokens).tolist():
                self._copies.pop((part.holder, block), None)
