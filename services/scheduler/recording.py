"""Flight record of a term: submissions, decisions and ends. Kinds of events: docs/explain.md.

It reads commands and effects and changes nothing.
"""

from collections.abc import Mapping

from services.scheduler.core.effects import (
    Effect,
    NoteRelief,
    NoteTurn,
    PublishMoved,
    PublishPrepared,
    PublishWorkerLost,
    SendPlan,
    SequenceLeft,
)
from services.scheduler.policy.relief import Relief
from services.scheduler.sequence_spans import SequenceSpans
from shared import spans
from shared.clock import monotonic_s
from shared.errors import KvasirError
from shared.log import canonical, get_logger
from shared.messages.commands import LengthPrediction
from shared.messages.moves import SequenceMove, SequenceMoved
from shared.messages.plans import BatchPlan
from shared.messages.sequence import SequenceRef, SequenceSpec
from shared.recorder import Batch, Recorder

_log = get_logger("scheduler")


class TermRecord:
    """Writes a term's events into the instance's recorder, and spans where enabled."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.spans = SequenceSpans() if spans.is_on() else None

    def close(self) -> None:
        """End the term's spans."""
        if self.spans is not None:
            self.spans.close()

    def submitted(self, spec: SequenceSpec, *, known: bool, queued: int) -> None:
        """Record a submission; `queued`: sequences of its model without a worker, itself included."""
        self._recorder.note(
            "submitted",
            spec.ref.request_id,
            **_ref(spec.ref),
            known=known,
            queued=queued,
            prompt_tokens=spec.prompt_tokens,
            max_tokens=spec.sampling.max_tokens,
            resumed_tokens=spec.generated_tokens,
            waited_s=spec.waited_s,
            priority=spec.priority,
        )
        if self.spans is not None:
            self.spans.submitted(spec, known=known)

    def refused(self, ref: SequenceRef, code: str, costs_s: dict[str, float]) -> None:
        """Record a refusal and the cost of accepting it."""
        self._recorder.note("refused", ref.request_id, **_ref(ref), error=code, costs_s=costs_s)

    def predicted(self, ref: SequenceRef, prediction: LengthPrediction) -> None:
        self._recorder.note(
            "predicted",
            ref.request_id,
            **_ref(ref),
            tokens=prediction.rl_tokens,
            p50_tokens=prediction.p50_tokens,
            p80_tokens=prediction.p80_tokens,
            p90_tokens=prediction.p90_tokens,
            p95_tokens=prediction.p95_tokens,
            model=prediction.model_version,
        )
        self._event(ref, "predicted", {"kvasir.predicted_tokens": prediction.rl_tokens})

    def placed(self, ref: SequenceRef, worker_id: str) -> None:
        self._recorder.note("placed", ref.request_id, **_ref(ref), worker=worker_id)
        self._event(ref, "placed", {"kvasir.worker": worker_id})

    def move_begun(self, order: SequenceMove) -> None:
        self._recorder.note(
            "move begun", order.ref.request_id, **_ref(order.ref), target=order.target, mode=str(order.mode)
        )

    def carried_out(self, effect: Effect) -> None:
        """Record one of the core's effects."""
        match effect:
            case SendPlan(worker_id, plan):
                self._plan(worker_id, plan)
            case PublishWorkerLost(lost):
                self._recorder.note("worker lost", worker=lost.worker_id, sequences=len(lost.refs))
                for ref in lost.refs:
                    self._recorder.note("lost", ref.request_id, **_ref(ref), worker=lost.worker_id)
                    self._event(ref, "worker lost", {"kvasir.worker": lost.worker_id})
            case PublishPrepared(prepared):
                ref = prepared.ref
                self._recorder.note("move prepared", ref.request_id, **_ref(ref), target=prepared.target)
            case PublishMoved(moved):
                self._moved(moved)
            case NoteRelief(worker_id, relief):
                self._relief(worker_id, relief)
            case NoteTurn(ref, turn):
                self._recorder.note(
                    "turn",
                    ref.request_id,
                    **_ref(ref),
                    tenant=turn.tenant,
                    served_s=dict(turn.served_s),
                    costs_s=dict(turn.costs_s),
                )
            case SequenceLeft():
                self._left(effect)

    def _plan(self, worker_id: str, plan: BatchPlan) -> None:
        now_s = monotonic_s()
        fields = {"worker": worker_id, "plan": plan.seq, "epoch": plan.epoch, "steps": plan.steps}
        chunks = tuple((chunk.ref, chunk.first_token, chunk.end_token) for chunk in plan.prefills)
        decodes = tuple(decode.ref for decode in plan.decodes)
        self._recorder.file(now_s, "plan", Batch(chunks, decodes, fields))
        for spec in plan.starts:
            self._recorder.note_at(
                now_s, "started", spec.ref.request_id, **_ref(spec.ref), worker=worker_id, plan=plan.seq
            )
            if self.spans is not None:
                self.spans.started(spec.ref, worker_id, now_s)
        for each in plan.preemptions:
            self._recorder.note_at(
                now_s,
                "preempted",
                each.ref.request_id,
                **_ref(each.ref),
                worker=worker_id,
                mode=str(each.mode),
            )
            self._event(each.ref, "preempted", {"kvasir.mode": str(each.mode)})

    def _moved(self, moved: SequenceMoved) -> None:
        self._recorder.note(
            "moved",
            moved.ref.request_id,
            **_ref(moved.ref),
            source=moved.source,
            target=moved.target,
            mode=str(moved.mode),
            failed=moved.reason,
            moved_bytes=moved.moved_bytes,
            late_bytes=moved.late_bytes,
            prepare_s=moved.prepare_s,
            switch_s=moved.switch_s,
        )
        fields = {
            "kvasir.source": moved.source,
            "kvasir.target": moved.target,
            "kvasir.mode": str(moved.mode),
        }
        self._event(moved.ref, "move failed" if moved.reason else "moved", fields)

    def _relief(self, worker_id: str, relief: Relief) -> None:
        chosen = relief.chosen
        offers = [[str(offer.rung), offer.blocks, offer.cost_s, offer.reason] for offer in relief.offers]
        self._recorder.note(
            "relief", worker=worker_id, chosen="wait" if chosen is None else str(chosen.rung), offers=offers
        )

    def _left(self, left: SequenceLeft) -> None:
        self._recorder.note(
            "left",
            left.ref.request_id,
            **_ref(left.ref),
            became=str(left.phase),
            reason="" if left.finish_reason is None else str(left.finish_reason),
            worker=left.worker_id or "",
            prompt_tokens=left.prompt_tokens,
            generated_tokens=left.generated_tokens,
            expected_tokens=left.expected_tokens,
            queued_s=left.queued_s,
            total_s=left.total_s,
        )
        if self.spans is not None:
            self.spans.left(left)

    def _event(self, ref: SequenceRef, name: str, fields: Mapping[str, str | int]) -> None:
        if self.spans is not None:
            self.spans.event(ref, name, fields)


def _ref(ref: SequenceRef) -> dict[str, int]:
    return {"choice": ref.choice, "attempt": ref.attempt}


def say_turn(note: NoteTurn) -> None:
    """Log a turn."""
    canonical(
        _log,
        "turn",
        ref=str(note.ref),
        tenant=note.turn.tenant,
        served_s=_rounded(dict(note.turn.served_s)),
        costs_s=_rounded(dict(note.turn.costs_s)),
    )


def say_refused(spec: SequenceSpec, error: KvasirError, costs_s: dict[str, float]) -> None:
    """Log a refusal and the cost of accepting it."""
    canonical(
        _log,
        "refused",
        ref=str(spec.ref),
        tenant=spec.tenant.name or None,
        error=error.code,
        reason=error.message,
        costs_s=_rounded(costs_s),
    )


def _rounded(costs_s: dict[str, float]) -> dict[str, float]:
    return {name: round(each_s, 4) for name, each_s in costs_s.items()}
