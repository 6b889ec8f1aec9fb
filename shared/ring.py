"""Ring of an instance's latest events: always on, in bounded memory. `shared.recorder` tells what is in it. A
note costs about a microsecond: a tuple appended, without formatting or copying. Steps and plans have many
rows, so they have a ring of their own, bounded by rows. Any thread may note."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from shared.clock import Clock, monotonic_s
from shared.messages.sequence import SequenceRef

MOST_EVENTS = 16_384
"""Per instance. A chat takes about ten at its gateway and ten at the scheduler: minutes under load."""
MOST_BATCHES, MOST_ROWS = 16_384, 262_144
"""Maximum steps and plans, and sequences in them: half a minute of steps with 64 sequences, about 6 MB."""

BatchRow = tuple[SequenceRef, int, int]
"""A sequence with the range [first, end) of its tokens."""
Note = tuple[int, float, str, str, dict[str, Any]]
"""Number, time, kind, request and fields of an event."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences in one executed step or in one plan."""

    prefills: Sequence[BatchRow] = ()
    decodes: Sequence[SequenceRef] = ()
    fields: dict[str, Any] | None = None


class Ring:
    """Notes of one instance. Beyond its bounds, the oldest are dropped."""

    def __init__(
        self,
        *,
        most_events: int = MOST_EVENTS,
        most_batches: int = MOST_BATCHES,
        most_rows: int = MOST_ROWS,
        clock: Clock = monotonic_s,
    ) -> None:
        self.clock = clock
        self.notes: deque[Note] = deque(maxlen=most_events)
        self.batches: deque[tuple[int, float, str, Batch]] = deque(maxlen=most_batches)
        self._seqs = count(1)
        self._most_rows, self._rows = most_rows, 0

    def note(self, kind: str, request_id: str = "", **fields: Any) -> None:
        """Record an event now. `fields` must fit msgpack and must not change afterwards."""
        self.notes.append((next(self._seqs), self.clock(), kind, request_id, fields))

    def note_at(self, at_s: float, kind: str, request_id: str = "", **fields: Any) -> None:
        """Record an event at a time of the recorder's clock."""
        self.notes.append((next(self._seqs), at_s, kind, request_id, fields))

    def file(self, at_s: float, kind: str, batch: Batch) -> None:
        """Record a started step or a sent plan. Only one thread may call this."""
        batches = self.batches
        self._rows += len(batch.prefills) + len(batch.decodes)
        while batches and (len(batches) == batches.maxlen or self._rows > self._most_rows):
            oldest = batches.popleft()[3]
            self._rows -= len(oldest.prefills) + len(oldest.decodes)
        batches.append((next(self._seqs), at_s, kind, batch))
