"""Which borrowed blocks are still what their copies are. Pure: looks at the parts of steps.

Only blocks that a sequence fills change; what was copied before has to be copied again then.
"""

from collections.abc import Mapping, Sequence

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
