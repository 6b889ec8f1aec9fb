"""Tokens that come after their sequence: what its former worker computed while it changed workers. Pure.

The gateway, which reads the former worker until this one has caught up, passes them on. They may come before
the sequence does, and some may never come. docs/migration.md.
"""

from collections import OrderedDict
from collections.abc import Sequence

from shared.messages.sequence import SequenceRef

MOST_SEQUENCES = 64
MOST_TOKENS = 64
"""Of one of them."""


class LateTokens:
    """By attempt; of too many sequences the first is forgotten."""

    def __init__(self) -> None:
        self._late: OrderedDict[SequenceRef, dict[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._late)

    def add(self, ref: SequenceRef, first_index: int, tokens: Sequence[int]) -> None:
        """These are the answer's tokens from that index on."""
        known = self._late.setdefault(ref, {})
        for index, token in enumerate(tokens, first_index):
            if len(known) < MOST_TOKENS:
                known[index] = token
        while len(self._late) > MOST_SEQUENCES:
            self._late.popitem(last=False)

    def take(self, ref: SequenceRef, first_index: int, most: int) -> list[int]:
        """Those that follow without a gap, at most so many, once."""
        known = self._late.get(ref, {})
        found: list[int] = []
        while len(found) < most and first_index + len(found) in known:
            found.append(known.pop(first_index + len(found)))
        return found

    def forget(self, ref: SequenceRef) -> None:
        """It has all that it takes."""
        self._late.pop(ref, None)
