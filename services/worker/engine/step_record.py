"""Records steps in the worker's flight recorder, and as trace spans if tracing is on.

All calls are on the engine's thread."""

from collections.abc import Collection
from dataclasses import dataclass

from services.worker.core.plans import StepWork
from services.worker.core.steps import StepEffects
from shared import spans
from shared.messages.plans import EndedSequence
from shared.messages.sequence import SequenceKey, SequenceRef
from shared.recorder import Batch, Recorder

_MOST_OPEN = 8192
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


class _StepSpans:
    """Trace spans of one worker: one per attempt with a `traceparent`, with prefill and decode inside.

    They are created when a sequence ends, so that a step costs one dictionary look-up per row."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._open: dict[SequenceRef, _Computed] = {}

    def ran(self, work: StepWork, began_s: float, step_s: float) -> None:
        """Record a step that began at `began_s` and took `step_s` seconds."""
        ended_s = began_s + step_s
        for item in work.items:
            sequence = item.sequence
            if not sequence.traceparent or item.guessed:
                continue
            found = self._open.get(sequence.ref)
            if found is None:
                if len(self._open) >= _MOST_OPEN:
                    continue
                found = _Computed(
                    sequence.traceparent, began_s, began_s, cached_tokens=sequence.cached_tokens
                )
                self._open[sequence.ref] = found
            found.ended_s = ended_s
            found.steps += 1
            found.step_s += step_s
            if item.is_decode:
                found.answer_began_s = found.answer_began_s or began_s
            else:
                found.prompt_end_s = ended_s
                found.prompt_tokens += item.end_token - item.first_token

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
        parent = spans.context_of(found.traceparent)
        whole = spans.begin("compute", parent=parent, began_s=found.began_s, attributes=attributes)
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


class StepRecord:
    """Recorder of one worker's steps.

    Each step records the engine's busy time before it. The time between two steps of a sequence then divides
    into other sequences' steps and waiting."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._busy_s = 0.0
        """Seconds that the engine has computed since the start."""
        self._spans = _StepSpans(recorder.instance) if spans.is_on() else None
        self._waiting: set[SequenceKey] = set()
        """Sequences that wait for stored blocks."""

    def ran(
        self, work: StepWork, began_s: float, step_s: float, effects: StepEffects, remote_s: float = 0.0
    ) -> None:
        """Record a computed step, its prefix cache hits and effects.

        `remote_s`: seconds of it spent waiting for creditors."""
        for hit in work.hits:
            ref, (device, host, disk) = hit.ref, hit.blocks
            self._recorder.note(
                "found",
                ref.request_id,
                choice=ref.choice,
                attempt=ref.attempt,
                tokens=hit.cached_tokens,
                device_blocks=device,
                host_blocks=host,
                disk_blocks=disk,
                peer_blocks=hit.peer_blocks,
            )
        plan, chunks = work.queued.plan, []
        decodes = [] if work.decodes is None else list(work.decodes.group.refs)
        for item in work.others:
            if item.is_decode and not item.guessed:
                decodes.append(item.sequence.ref)
            elif not item.is_decode:
                chunks.append((item.sequence.ref, item.first_token, item.end_token))
        fields = {"step_s": step_s, "busy_s": self._busy_s, "heard_s": work.queued.received_s}
        fields |= {"plan": plan.seq, "epoch": plan.epoch}
        if remote_s > 0.0:
            fields["remote_s"] = remote_s
        if effects.stepped:
            fields["free_blocks"] = effects.stepped[-1].free_blocks
        self._busy_s += step_s
        if self._spans is not None:
            self._spans.ran(work, began_s, step_s)
        self._recorder.file(began_s, "step", Batch(chunks, decodes, fields))

    def said(self, effects: StepEffects, now_s: float) -> None:
        """Record the sequences that ended in `effects`."""
        for stepped in effects.stepped:
            for ended in stepped.ended:
                ref, reason = ended.ref, str(ended.finish_reason)
                numbers = {
                    "choice": ref.choice,
                    "attempt": ref.attempt,
                    "generated_tokens": ended.generated_tokens,
                }
                self._recorder.note_at(now_s, "ended", ref.request_id, reason=reason, **numbers)
                if self._spans is not None:
                    self._spans.ended(ended)

    def waits(self, put_off: Collection[SequenceKey], now_s: float) -> None:
        """Record which sequences begin or stop waiting for stored blocks."""
        present = set(put_off)
        for key in present - self._waiting:
            self._recorder.note_at(now_s, "waits for blocks", key[0], choice=key[1])
        for key in self._waiting - present:
            self._recorder.note_at(now_s, "has blocks", key[0], choice=key[1])
        self._waiting = present
