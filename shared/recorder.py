"""Flight recorder: the latest events of one instance, always on, in bounded memory.

A service notes its decisions and events. `TellRecorded` reads them, for one request (`services explain`) or
for all (`services record`, the live page). A note costs about a microsecond: a tuple appended to a ring,
without formatting or copying. Steps and plans have many rows, so they use a ring of their own, bounded by
rows. Any thread may note.
"""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec

from shared.clock import Clock, monotonic_s, unix_s
from shared.messages.recordings import Recorded, RecordedEvent, TellRecorded
from shared.messages.sequence import SequenceRef

MOST_EVENTS = 16_384
"""Per instance. A chat takes about ten at its gateway and ten at the scheduler: minutes under load."""
MOST_BATCHES, MOST_ROWS = 16_384, 262_144
"""Maximum steps and plans, and sequences in them: half a minute of steps with 64 sequences, about 6 MB."""
_MOST_BYTES = 400_000
"""Maximum size of one reply, which must fit a message."""

BatchRow = tuple[SequenceRef, int, int]
"""A sequence with the range [first, end) of its tokens."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences in one executed step or in one plan."""

    prefills: Sequence[BatchRow] = ()
    decodes: Sequence[SequenceRef] = ()
    fields: dict[str, Any] | None = None

    @property
    def rows(self) -> int:
        return len(self.prefills) + len(self.decodes)

    def of_request(self, request_id: str) -> dict[str, Any] | None:
        """Return a request's share of the batch, or None."""
        chunks = [
            (ref.choice, ref.attempt, first, end)
            for ref, first, end in self.prefills
            if ref.request_id == request_id
        ]
        own = [(ref.choice, ref.attempt) for ref in self.decodes if ref.request_id == request_id]
        if not chunks and not own:
            return None
        return {**self.totals(), "chunks": chunks, "own": own}

    def totals(self) -> dict[str, Any]:
        """Return sizes without request ids."""
        return {
            **(self.fields or {}),
            "prefills": len(self.prefills),
            "decodes": len(self.decodes),
            "prefill_tokens": sum(end - first for _, first, end in self.prefills),
        }

    def whole(self) -> dict[str, Any]:
        """Return everything, with request ids."""
        return {
            **self.totals(),
            "chunks": [(*_names(ref), first, end) for ref, first, end in self.prefills],
            "own": [_names(ref) for ref in self.decodes],
        }


def _names(ref: SequenceRef) -> tuple[str, int, int]:
    return ref.request_id, ref.choice, ref.attempt


_Note = tuple[int, float, str, str, dict[str, Any]]
_Filed = tuple[int, float, str, Batch]


class Recorder:
    """Recorder of one instance. Beyond its bounds, the oldest events are dropped."""

    def __init__(
        self,
        service: str,
        instance: str,
        incarnation: int,
        *,
        most_events: int = MOST_EVENTS,
        most_batches: int = MOST_BATCHES,
        most_rows: int = MOST_ROWS,
        clock: Clock = monotonic_s,
    ) -> None:
        self._origin = (service, instance, incarnation)
        self._clock = clock
        self._seqs = count(1)
        self._notes: deque[_Note] = deque(maxlen=most_events)
        self._batches: deque[_Filed] = deque(maxlen=most_batches)
        self._most_rows = most_rows
        self._rows = 0

    @property
    def instance(self) -> str:
        """Instance that it records."""
        return self._origin[1]

    def note(self, kind: str, request_id: str = "", **fields: Any) -> None:
        """Record an event now. `fields` must fit msgpack and must not change afterwards."""
        self._notes.append((next(self._seqs), self._clock(), kind, request_id, fields))

    def note_at(self, at_s: float, kind: str, request_id: str = "", **fields: Any) -> None:
        """Record an event at a time of the recorder's clock."""
        self._notes.append((next(self._seqs), at_s, kind, request_id, fields))

    def file(self, at_s: float, kind: str, batch: Batch) -> None:
        """Record a started step or a sent plan. Only one thread may call this."""
        batches = self._batches
        self._rows += batch.rows
        if len(batches) == batches.maxlen or self._rows > self._most_rows:
            self._make_room()
        batches.append((next(self._seqs), at_s, kind, batch))

    def _make_room(self) -> None:
        batches = self._batches
        while batches and (len(batches) == batches.maxlen or self._rows > self._most_rows):
            self._rows -= batches.popleft()[3].rows

    async def tell(self, question: TellRecorded) -> Recorded:
        """Handler of `TellRecorded`. Runs in a thread, because it may take milliseconds."""
        return await asyncio.to_thread(self.recorded, question)

    def recorded(self, question: TellRecorded) -> Recorded:
        """Return the recorded events. Thread-safe."""
        service, instance, incarnation = self._origin
        notes, batches = list(self._notes), list(self._batches)
        found = sorted((*_of_notes(notes, question), *_of_batches(batches, question)), key=_seq)
        most = min(question.most, MOST_EVENTS + MOST_BATCHES)
        since_seq = question.since_seq or 0
        is_latest = question.since_seq is None
        cut = found[-most:] if is_latest and most else found[:most]
        events = _fitting(cut, latest=is_latest)
        oldest = min((ring[0][0] for ring in (notes, batches) if ring), default=0)
        newest = max((ring[-1][0] for ring in (notes, batches) if ring), default=since_seq)
        is_all = len(events) == len(found) or is_latest
        return Recorded(
            instance=instance,
            service=service,
            incarnation=incarnation,
            now_s=self._clock(),
            unix_s=unix_s(),
            oldest_seq=oldest,
            next_seq=max(newest, since_seq) if is_all else events[-1].seq,
            events=tuple(events),
        )


def _seq(event: RecordedEvent) -> int:
    return event.seq


def _of_notes(notes: Sequence[_Note], question: TellRecorded) -> Iterator[RecordedEvent]:
    wanted, kinds, since_seq = question.request_id, question.kinds, question.since_seq or 0
    for seq, at_s, kind, request_id, fields in notes:
        if seq <= since_seq or (kinds and kind not in kinds):
            continue
        if not wanted or request_id == wanted:
            yield RecordedEvent(seq=seq, at_s=at_s, kind=kind, request_id=request_id, fields=fields)


def _of_batches(batches: Sequence[_Filed], question: TellRecorded) -> Iterator[RecordedEvent]:
    wanted, kinds, since_seq = question.request_id, question.kinds, question.since_seq or 0
    for seq, at_s, kind, batch in batches:
        if seq <= since_seq or (kinds and kind not in kinds):
            continue
        fields = batch.of_request(wanted) if wanted else batch.whole()
        if fields is not None:
            yield RecordedEvent(seq=seq, at_s=at_s, kind=kind, request_id=wanted, fields=fields)


def _fitting(events: Sequence[RecordedEvent], *, latest: bool) -> list[RecordedEvent]:
    """Return as many events as fit one message: the latest or the first."""
    kept: list[RecordedEvent] = []
    left_bytes = _MOST_BYTES
    for event in reversed(events) if latest else events:
        left_bytes -= len(msgspec.msgpack.encode(event))
        if left_bytes < 0:
            break
        kept.append(event)
    return kept[::-1] if latest else kept
