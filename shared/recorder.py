"""Flight recorder: answers what an instance has noted in its ring (`shared.ring`). `TellRecorded` reads the
events of one request (`kvasir explain`) or all (`kvasir record`, the live page)."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from shared.clock import unix_s
from shared.messages.recordings import Recorded, RecordedEvent, TellRecorded
from shared.messages.sequence import SequenceRef
from shared.ring import MOST_BATCHES, MOST_EVENTS, MOST_ROWS, Batch, Note, Ring

__all__ = ["MOST_BATCHES", "MOST_EVENTS", "MOST_ROWS", "Batch", "Recorder"]
_MOST_BYTES = 400_000
"""Maximum size of one reply, which must fit a message."""


class Recorder(Ring):
    """Ring of one instance that can be read over the bus."""

    def __init__(self, service: str, instance: str, incarnation: int, **bounds: Any) -> None:
        """For `bounds` see `Ring`."""
        super().__init__(**bounds)
        self.service, self.instance, self.incarnation = service, instance, incarnation

    async def tell(self, question: TellRecorded) -> Recorded:
        """Handler of `TellRecorded`. Runs in a thread, because it may take milliseconds."""
        return await asyncio.to_thread(self.recorded, question)

    def recorded(self, question: TellRecorded) -> Recorded:
        """Return the recorded events. Thread-safe."""
        notes, batches = list(self.notes), list(self.batches)
        found = sorted(
            (*_of_notes(notes, question), *_of_batches(batches, question)), key=lambda event: event.seq
        )
        most = min(question.most, MOST_EVENTS + MOST_BATCHES)
        since_seq = question.since_seq or 0
        is_latest = question.since_seq is None
        cut = found[-most:] if is_latest and most else found[:most]
        events = _fitting(cut, latest=is_latest)
        oldest = min((ring[0][0] for ring in (notes, batches) if ring), default=0)
        newest = max((ring[-1][0] for ring in (notes, batches) if ring), default=since_seq)
        is_all = len(events) == len(found) or is_latest
        return Recorded(
            instance=self.instance,
            service=self.service,
            incarnation=self.incarnation,
            now_s=self.clock(),
            unix_s=unix_s(),
            oldest_seq=oldest,
            next_seq=max(newest, since_seq) if is_all else events[-1].seq,
            events=tuple(events),
        )


def _of_notes(notes: Sequence[Note], question: TellRecorded) -> Iterator[RecordedEvent]:
    wanted, kinds, since_seq = question.request_id, question.kinds, question.since_seq or 0
    for seq, at_s, kind, request_id, fields in notes:
        if seq <= since_seq or (kinds and kind not in kinds):
            continue
        if not wanted or request_id == wanted:
            yield RecordedEvent(seq=seq, at_s=at_s, kind=kind, request_id=request_id, fields=fields)


def _of_batches(
    batches: Sequence[tuple[int, float, str, Batch]], question: TellRecorded
) -> Iterator[RecordedEvent]:
    wanted, kinds, since_seq = question.request_id, question.kinds, question.since_seq or 0
    for seq, at_s, kind, batch in batches:
        if seq <= since_seq or (kinds and kind not in kinds):
            continue
        everything = _totals if question.is_brief else _whole
        fields = _of_request(batch, wanted) if wanted else everything(batch)
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


def _totals(batch: Batch) -> dict[str, Any]:
    """Return sizes without request ids."""
    return {
        **(batch.fields or {}),
        "prefills": len(batch.prefills),
        "decodes": len(batch.decodes),
        "prefill_tokens": sum(end - first for _, first, end in batch.prefills),
    }


def _of_request(batch: Batch, request_id: str) -> dict[str, Any] | None:
    """Return a request's share of the batch, or None."""
    chunks = [
        (ref.choice, ref.attempt, first, end)
        for ref, first, end in batch.prefills
        if ref.request_id == request_id
    ]
    own = [(ref.choice, ref.attempt) for ref in batch.decodes if ref.request_id == request_id]
    return {**_totals(batch), "chunks": chunks, "own": own} if chunks or own else None


def _whole(batch: Batch) -> dict[str, Any]:
    """Return everything, with request ids."""
    chunks = [(*_names(ref), first, end) for ref, first, end in batch.prefills]
    return {**_totals(batch), "chunks": chunks, "own": list(map(_names, batch.decodes))}


def _names(ref: SequenceRef) -> tuple[str, int, int]:
    return ref.request_id, ref.choice, ref.attempt
