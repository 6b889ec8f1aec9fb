"""Trace spans of a worker: one per attempt, with prefill and decode spans inside.

Only for sequences with a `traceparent`, and only if tracing is on. Spans are created when a sequence ends, so
that a step costs one dictionary look-up per row. All calls are on the engine's thread.
"""

from dataclasses import dataclass

from services.worker.core.plans import StepWork
from services.worker.core.sequence import HeldSequence
from shared import spans
from shared.messages.plans import EndedSequence
from shared.messages.sequence import SequenceRef

MOST_OPEN = 8192
"""Most sequences with a span at a time; more get none."""


@dataclass(slots=True)
class _Computed:
    """Times of one attempt, on the clock of the steps."""

    traceparent: str
    began_s: float
    ended_s: float
    prompt_end_s: float = 0.0
    """End of the last prefill step; 0: none yet."""
    answer_began_s: float = 0.0
    """Start of the first decode; 0: none yet."""
    steps: int = 0
    step_s: float = 0.0
    """Total seconds of its steps, including other sequences' rows."""
    prompt_tokens: int = 0
    """Number of prompt tokens computed here, without cached ones."""
    cached_tokens: int = 0


class StepSpans:
    """Open spans of one worker."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._open: dict[SequenceRef, _Computed] = {}

    def ran(self, work: StepWork, began_s: float, step_s: float) -> None:
        """Record a step that began at `began_s` and took `step_s` seconds."""
        ended_s = began_s + step_s
        for item in work.items:
            sequence = item.sequence
            if not sequence.traceparent or (found := self._of(sequence, began_s)) is None:
                continue
            found.ended_s = ended_s
            found.steps += 1
            found.step_s += step_s
            if item.is_decode:
                found.answer_began_s = found.answer_began_s or began_s
            else:
                found.prompt_end_s = ended_s
                found.prompt_tokens += item.end_token - item.first_token

    def _of(self, sequence: HeldSequence, began_s: float) -> _Computed | None:
        found = self._open.get(sequence.ref)
        if found is None and len(self._open) < MOST_OPEN:
            found = _Computed(sequence.traceparent, began_s, began_s, cached_tokens=sequence.cached_tokens)
            self._open[sequence.ref] = found
        return found

    def ended(self, ended: EndedSequence) -> None:
        """Create the spans of a sequence that ended."""
        found = self._open.pop(ended.ref, None)
        if found is None:
            return
        attributes: dict[str, str | int | float | list[str]] = {
            "kvasir.worker": self._worker_id,
            "kvasir.request_id": ended.ref.request_id,
            "kvasir.choice": ended.ref.choice,
            "kvasir.attempt": ended.ref.attempt,
            "kvasir.steps": found.steps,
            "kvasir.step_s": found.step_s,
            "kvasir.computed_prompt_tokens": found.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": found.cached_tokens,
            "gen_ai.usage.output_tokens": ended.generated_tokens,
            "gen_ai.response.finish_reasons": [str(ended.finish_reason)],
        }
        whole = spans.begin(
            "compute",
            parent=spans.context_of(found.traceparent),
            began_s=found.began_s,
            attributes=attributes,
        )
        if whole is None:
            return
        inside = spans.below(whole)
        parts = (
            ("prefill", found.began_s if found.prompt_end_s else 0.0, found.prompt_end_s),
            ("decode", found.answer_began_s, found.ended_s),
        )
        for name, began_s, ended_s in parts:
            if began_s and (part := spans.begin(name, parent=inside, began_s=began_s)) is not None:
                spans.end(part, ended_s=ended_s)
        spans.end(whole, ended_s=found.ended_s)
