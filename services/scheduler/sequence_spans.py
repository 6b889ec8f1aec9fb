"""Tracing spans of a term's sequences, below the gateway's request span: the whole stay, and the wait."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import Span

from services.scheduler.core.effects import SequenceLeft
from shared import spans
from shared.messages.sequence import SequenceKey, SequenceRef, SequenceSpec

MOST_OPEN = 16_384
"""Maximum open sequences; later ones have no span."""


@dataclass(slots=True)
class _Open:
    attempt: int
    whole: Span
    waiting: Span | None
    """None once a worker has it."""


class SequenceSpans:
    """Spans by sequence; a new attempt ends those of the previous one."""

    def __init__(self) -> None:
        self._open: dict[SequenceKey, _Open] = {}

    def submitted(self, spec: SequenceSpec, *, known: bool) -> None:
        """Open the spans of an accepted sequence; `known`: it was here before and continues."""
        ref = spec.ref
        before = self._open.get(ref.key)
        if before is not None and before.attempt == ref.attempt:
            return
        if before is not None:
            self._end(ref.key, "superseded")
        if not spec.traceparent or len(self._open) >= MOST_OPEN:
            return
        attributes: dict[str, str | bool | int] = {
            "kvasir.request_id": ref.request_id,
            "kvasir.choice": ref.choice,
            "kvasir.attempt": ref.attempt,
            "kvasir.known": known,
            "gen_ai.usage.input_tokens": spec.prompt_tokens,
        }
        whole = spans.begin("sequence", parent=spans.context_of(spec.traceparent), attributes=attributes)
        if whole is not None:
            waiting = spans.begin("queued", parent=spans.below(whole))
            self._open[ref.key] = _Open(ref.attempt, whole, waiting)

    def within(self, refs: Iterable[SequenceRef]) -> Context:
        """Return the trace context of the first of these sequences that has a span."""
        for ref in refs:
            if (found := self._open.get(ref.key)) is not None:
                return spans.below(found.whole)
        return Context()

    def event(self, ref: SequenceRef, name: str, fields: Mapping[str, str | int]) -> None:
        """Add an event to the sequence's span."""
        found = self._open.get(ref.key)
        if found is not None:
            spans.event(found.whole, name, attributes=fields)

    def started(self, ref: SequenceRef, worker_id: str, now_s: float) -> None:
        """End the wait of a sequence that a plan starts."""
        found = self._open.get(ref.key)
        if found is None or found.attempt != ref.attempt:
            return
        if found.waiting is not None:
            spans.end(found.waiting, ended_s=now_s)
            found.waiting = None
        spans.event(found.whole, "started", now_s, {"kvasir.worker": worker_id})

    def left(self, left: SequenceLeft) -> None:
        """End the spans of a finished sequence."""
        found = self._open.get(left.ref.key)
        if found is None or found.attempt != left.ref.attempt:
            return
        attributes: dict[str, str | int | float] = {
            "kvasir.queued_s": left.queued_s,
            "kvasir.worker": left.worker_id or "",
            "gen_ai.usage.cache_read.input_tokens": left.cached_tokens,
        }
        if left.generated_tokens is not None:
            attributes["gen_ai.usage.output_tokens"] = left.generated_tokens
        if left.expected_tokens is not None:
            attributes["kvasir.expected_cached_tokens"] = left.expected_tokens
        found.whole.set_attributes(attributes)
        self._end(left.ref.key, str(left.phase))

    def close(self) -> None:
        """End all spans with the term."""
        for key in list(self._open):
            self._end(key, "the term is over")

    def _end(self, key: SequenceKey, became: str) -> None:
        found = self._open.pop(key)
        if found.waiting is not None:
            spans.end(found.waiting)
        spans.end(found.whole, attributes={"kvasir.became": became})
