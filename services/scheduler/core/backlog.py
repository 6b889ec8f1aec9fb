"""Sequences that wait for a worker, and the one open question to placement about them. Pure.

First come, first served: the oldest are asked about first, in order. No answer, and no worker for an item,
both mean that it is asked again: when something changed, or after an interval.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from services.scheduler.core.effects import AskPlacement
from services.scheduler.core.rules import Rules
from services.scheduler.core.sequence import Kind, Sequence, names_of
from shared.messages.commands import PlacementItem
from shared.messages.sequence import SequenceKey, SequenceRef
from shared.messages.values import as_count, as_seconds

NO_QUESTION = 0
"""Questions are numbered from 1."""


class Backlog:
    """Ordered by arrival; bounded by whoever adds to it."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._waiting: list[Sequence] = []
        self._question = NO_QUESTION
        self._open: tuple[SequenceRef, ...] | None = None
        self._due_s = float("-inf")

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        at = bisect_left(self._waiting, sequence.order, key=_order)
        return at < len(self._waiting) and self._waiting[at] is sequence

    def add(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=_order)
        self.poke()

    def remove(self, sequence: Sequence) -> None:
        """Raises ValueError when it does not wait."""
        if sequence not in self:
            raise ValueError(f"{sequence.ref} is not in the backlog")
        del self._waiting[bisect_left(self._waiting, sequence.order, key=_order)]

    def poke(self) -> None:
        """Something changed: the next question need not wait for the interval."""
        self._due_s = float("-inf")

    def is_due(self, now_s: float) -> bool:
        """Whether somebody is to be asked about, and no question is open."""
        return self._open is None and bool(self._waiting) and now_s >= self._due_s

    def ask(
        self, excluded_workers: tuple[str, ...], now_s: float, kinds: tuple[Kind, ...] = ()
    ) -> AskPlacement | None:
        """The next question, when one is due and none is open. `kinds` of workers name prompts' blocks."""
        if not self.is_due(now_s):
            return None
        batch = self._waiting[: self._rules.placement_batch]
        self._question += 1
        self._open = tuple(sequence.ref for sequence in batch)
        self._due_s = float("inf")
        items = tuple(_item(sequence, kinds, now_s) for sequence in batch)
        return AskPlacement(self._question, items, excluded_workers)

    @staticmethod
    def tell(sequence: Sequence, excluded_workers: tuple[str, ...]) -> AskPlacement:
        """For placement's books, about a sequence that needed no question: nobody waits for the answer."""
        return AskPlacement(NO_QUESTION, (_item(sequence, (), sequence.arrival_s),), excluded_workers)

    def close(self, question: int, *, more: bool, now_s: float) -> tuple[SequenceRef, ...]:
        """The refs that the question was about; empty when it is not the open one. `more`: go on without a
        pause."""
        if question != self._question or self._open is None:
            return ()
        refs, self._open = self._open, None
        poked = self._due_s == float("-inf")
        self._due_s = float("-inf") if more or poked else now_s + self._rules.placement_interval_s
        return refs

    def check_integrity(self) -> None:
        keys: list[SequenceKey] = [sequence.key for sequence in self._waiting]
        assert len(keys) == len(set(keys))
        assert self._waiting == sorted(self._waiting, key=_order), "out of order"


def _item(sequence: Sequence, kinds: tuple[Kind, ...], now_s: float) -> PlacementItem:
    return PlacementItem(
        ref=sequence.ref,
        size_tokens=as_count(sequence.prompt_tokens + sequence.generated_tokens),
        limit_tokens=as_count(sequence.limit_tokens),
        prefixes=names_of(sequence, kinds),
        waited_s=as_seconds(max(0.0, now_s - sequence.arrival_s)),
    )


def _order(sequence: Sequence) -> tuple[float, SequenceKey]:
    return sequence.order
