"""What is written to borrowed blocks while they are copied home. Knows parts of steps; no link, no tensor."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from services.worker.engine.partition import ELSEWHERE, Part

Place = tuple[int, int]
"""Holder, and block there."""


class WriteWatch:
    """Of one debtor, and of the latest round of copies."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._copies: dict[Place, int] = {}

    def restart(self, copies: Mapping[Place, int]) -> None:
        """Own blocks into which these are copied now; earlier copies count no more."""
        self._copies = dict(copies)

    def discard(self, own: Iterable[int]) -> None:
        """Into these nothing was copied after all."""
        missed = set(own)
        self._copies = {place: block for place, block in self._copies.items() if block not in missed}

    def is_copy(self, place: Place, own: int) -> bool:
        """Whether the own block holds what the place does."""
        return self._copies.get(place) == own

    def on_step(self, parts: Sequence[Part]) -> None:
        """These will be computed."""
        if not self._copies:
            return
        for part in parts:
            slots = part.spans.slots
            for block in np.unique(slots[slots != ELSEWHERE] // self._block_tokens).tolist():
                self._copies.pop((part.holder, block), None)
