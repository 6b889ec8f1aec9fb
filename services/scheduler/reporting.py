"""Reports on a term: log lines, metrics, counts for `status`, flight record and spans. It changes nothing.

Kinds of recorded events: docs/explain.md. Units of service are those of billing; the queue has an account of
its own (`policy/tenants.py`).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from services.scheduler.core import effects
from services.scheduler.sequence_spans import SequenceSpans
from shared import metrics, spans
from shared.clock import monotonic_s
from shared.errors import KvasirError
from shared.log import canonical, detail, get_logger
from shared.messages.commands import LengthPrediction
from shared.messages.moves import SequenceMove, SequenceMoved
from shared.messages.plans import BatchPlan
from shared.messages.reports import WAIT_BOUNDS_S, WorkerLost
from shared.messages.sequence import SequenceRef, SequenceSpec
from shared.messages.values import as_count, as_seconds
from shared.recorder import Batch, Recorder

_log = get_logger("scheduler")
_MOST_TENANTS = 256
"""Maximum rows of tenants; later ones share a row."""
_PLAN_COUNTS = {
    "plans": ("kvasir_scheduler_plans_total", "Plans sent"),
    "steps": ("kvasir_scheduler_planned_steps_total", "Steps planned"),
    "superseding": ("kvasir_scheduler_superseding_plans_total", "Plans that cut earlier ones short"),
    "starts": ("kvasir_scheduler_starts_total", "Sequences started at a worker"),
    "preemptions": ("kvasir_scheduler_preemptions_total", "Sequences preempted"),
    "prefill_tokens": ("kvasir_scheduler_planned_prefill_tokens_total", "Prompt tokens planned"),
}
_SERVICE = ("sequences", "computed_tokens", "cached_tokens", "generated_tokens", "kv_token_s")
_HITS = ("placed_prompt_tokens", "hits_expected_tokens", "hits_found_tokens", "hits_error_tokens")


class TermReport:
    """Reports of one term. Metrics belong to the process, everything else to the term."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.spans = SequenceSpans() if spans.is_on() else None
        """None unless spans are enabled."""
        counter = metrics.counter
        self._plan_counters = {name: counter(*said) for name, said in _PLAN_COUNTS.items()}
        self.plans = dict.fromkeys(_PLAN_COUNTS, 0)
        self.hits = dict.fromkeys(_HITS, 0)
        """Prompt tokens that placement expected in caches, and those found, of sequences that started."""
        self._waits = [0] * (len(WAIT_BOUNDS_S) + 1)
        self._waited_s = 0.0
        self._services: dict[str, dict[str, float]] = {}
        """By tenant. `kv_token_s`: KV tokens times the seconds for which they were held."""
        self._tokens = counter("kvasir_scheduler_tenant_tokens_total", "Tokens served", ("tenant", "kind"))
        self._kv = counter(
            "kvasir_scheduler_tenant_kv_token_seconds_total", "Tokens of KV times seconds held", ("tenant",)
        )
        self._left = counter("kvasir_scheduler_sequences_total", "Sequences over", ("phase",))
        self._moved = counter("kvasir_scheduler_moves_total", "Migrations over", ("outcome",))
        self._foreign = counter(
            "kvasir_scheduler_foreign_cancels_total", "Cancels of another gateway's sequence; ignored"
        )
        self._unplaced = counter(
            "kvasir_scheduler_placed_without_total", "Sequences placed without placement's answer"
        )
        self._lost = counter("kvasir_scheduler_workers_lost_total", "Workers given up")

    def submitted(self, spec: SequenceSpec, *, known: bool, queued: int) -> None:
        """Report a submission; `queued`: sequences of its model without a worker, itself included."""
        self._note(
            "submitted",
            spec.ref,
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

    def refused(self, spec: SequenceSpec, error: KvasirError, costs_s: dict[str, float]) -> None:
        """Report a refusal and the cost of accepting it."""
        self._note("refused", spec.ref, error=error.code, costs_s=costs_s)
        detail(
            _log,
            "refused",
            ref=str(spec.ref),
            tenant=spec.tenant.name or None,
            error=error.code,
            reason=error.message,
            costs_s=_rounded(costs_s),
        )

    def predicted(self, ref: SequenceRef, prediction: LengthPrediction) -> None:
        self._note(
            "predicted",
            ref,
            {"kvasir.predicted_tokens": prediction.rl_tokens},
            tokens=prediction.rl_tokens,
            p50_tokens=prediction.p50_tokens,
            p80_tokens=prediction.p80_tokens,
            p90_tokens=prediction.p90_tokens,
            p95_tokens=prediction.p95_tokens,
            model=prediction.model_version,
        )

    def placed(self, ref: SequenceRef, worker_id: str) -> None:
        self._note("placed", ref, {"kvasir.worker": worker_id}, worker=worker_id)

    def move_begun(self, order: SequenceMove) -> None:
        self._note("move begun", order.ref, target=order.target, mode=str(order.mode), why=order.why)

    def note(self, effect: effects.Effect) -> None:
        """Report one of the core's effects."""
        match effect:
            case effects.SendPlan(worker_id, plan):
                self._plan(worker_id, plan)
            case effects.SequenceLeft():
                self._leave(effect)
            case effects.NotePlaced(ref, worker_id, why):
                self._unplaced.inc()
                self._note("placed", ref, worker=worker_id, why=why)
            case effects.PublishWorkerLost(lost):
                self._lose(lost)
            case effects.PublishPrepared(prepared):
                self._note("move prepared", prepared.ref, target=prepared.target)
            case effects.PublishMoved(moved):
                self._move(moved)
            case effects.NoteRelief(worker_id, relief):
                offers = [[one.rung, one.blocks, one.cost_s, one.reason] for one in relief.offers]
                chosen = "wait" if relief.chosen is None else relief.chosen.rung
                self._recorder.note("relief", worker=worker_id, chosen=chosen, offers=offers)
                canonical(_log, "relief", worker=worker_id, reason=relief.reason)
            case effects.NoteTurn(ref, turn):
                served_s, costs_s = dict(turn.served_s), dict(turn.costs_s)
                self._note("turn", ref, tenant=turn.tenant, served_s=served_s, costs_s=costs_s)
                shown = {"served_s": _rounded(served_s), "costs_s": _rounded(costs_s)}
                detail(_log, "turn", ref=str(ref), tenant=turn.tenant, **shown)
            case effects.NoteForeign(gateway_id, ref):
                self._foreign.inc()
                _log.warning("%s would have cancelled %s, which is another gateway's", gateway_id, ref)
            case effects.RefuseWorker(_, mismatch):
                _log.error("refused: %s (%s)", mismatch.message, mismatch.code)
            case effects.NotePolicyFailed(worker_id, failed):
                _log.error("%s at %s", failed.message, worker_id)
            case effects.NoteStandstill(place, waiting, still_s):
                _log.error(
                    "work waits and nothing moves: %d sequences at %s, for %.0f s; look at what `status` "
                    "says of blocks; a scheduler that is started anew asks all workers what they hold",
                    waiting,
                    place,
                    still_s,
                )

    def announced(self) -> dict[str, Any]:
        """Return the term's totals for `SchedulerAnnounced`."""
        waits, preemptions = tuple(map(as_count, self._waits)), as_count(self.plans["preemptions"])
        waited_s = as_seconds(self._waited_s)
        return {"preemptions": preemptions, "waits": waits, "waited_s": waited_s, **self.hits}

    def tenants(
        self, charged_s: Iterable[tuple[str, float]], present: Iterable[tuple[tuple[str, bool], int]]
    ) -> list[dict[str, Any]]:
        """Return a row per tenant that was served or is present. `charged_s`: queue counters. `present`:
        sequences by tenant and whether a worker holds them."""
        counters: dict[str, float] = {}
        for name, counter_s in charged_s:
            counters[name or "-"] = counters.get(name or "-", 0.0) + counter_s
        here: Counter[tuple[str, bool]] = Counter()
        rows = dict(self._services)
        for (tenant, is_held), count in present:
            name = _row_of(tenant, rows)
            rows.setdefault(name, dict.fromkeys(_SERVICE, 0))
            here[name, is_held] += count
        return [
            {
                "tenant": name,
                "waiting": here[name, False],
                "running": here[name, True],
                **service,
                "kv_token_s": round(service["kv_token_s"], 1),
                "charged_s": round(counters.get(name, 0.0), 3),
            }
            for name, service in sorted(rows.items())
        ]

    def _note(
        self, kind: str, ref: SequenceRef, span: Mapping[str, str | int] = {}, /, **fields: Any
    ) -> None:
        """Record an event of a sequence, and with `span`, its attributes there, add it to its span."""
        self._recorder.note(kind, ref.request_id, choice=ref.choice, attempt=ref.attempt, **fields)
        if span and self.spans is not None:
            self.spans.event(ref, kind, span)

    def _plan(self, worker_id: str, plan: BatchPlan) -> None:
        now_s = monotonic_s()
        fields = {"worker": worker_id, "plan": plan.seq, "epoch": plan.epoch, "steps": plan.steps}
        chunks = tuple([(chunk.ref, chunk.first_token, chunk.end_token) for chunk in plan.prefills])
        decodes = tuple([decode.ref for decode in plan.decodes])
        self._recorder.file(now_s, "plan", Batch(chunks, decodes, fields))
        prefill_tokens = sum([end - first for _, first, end in chunks])
        counts = (1, plan.steps, plan.supersedes, len(plan.starts), len(plan.preemptions), prefill_tokens)
        for (name, counter), amount in zip(self._plan_counters.items(), counts, strict=True):
            self.plans[name] += amount
            counter.inc(amount)
        for spec in plan.starts:
            ref = spec.ref
            its = {"choice": ref.choice, "attempt": ref.attempt, "worker": worker_id, "plan": plan.seq}
            self._recorder.note_at(now_s, "started", ref.request_id, **its)
            if self.spans is not None:
                self.spans.started(ref, worker_id, now_s)
        for each in plan.preemptions:
            ref, mode = each.ref, str(each.mode)
            its = {"choice": ref.choice, "attempt": ref.attempt, "worker": worker_id, "mode": mode}
            self._recorder.note_at(now_s, "preempted", ref.request_id, **its)
            if self.spans is not None:
                self.spans.event(ref, "preempted", {"kvasir.mode": mode})

    def _lose(self, lost: WorkerLost) -> None:
        """Report a lost worker; one without sequences was usually parked."""
        self._lost.inc()
        self._recorder.note("worker lost", worker=lost.worker_id, sequences=len(lost.refs))
        for ref in lost.refs:
            self._note("lost", ref, worker=lost.worker_id)
            if self.spans is not None:
                self.spans.event(ref, "worker lost", {"kvasir.worker": lost.worker_id})
        if lost.refs:
            _log.warning("worker %s is lost, with %d sequences", lost.worker_id, len(lost.refs))
        else:
            _log.info("worker %s has gone; it had nothing to do", lost.worker_id)

    def _move(self, moved: SequenceMoved) -> None:
        told = {"source": moved.source, "target": moved.target, "mode": str(moved.mode), "why": moved.why}
        self._note(
            "moved",
            moved.ref,
            **told,
            failed=moved.reason,
            moved_bytes=moved.moved_bytes,
            late_bytes=moved.late_bytes,
            prepare_s=moved.prepare_s,
            switch_s=moved.switch_s,
        )
        if self.spans is not None:
            fields = {f"kvasir.{name}": value for name, value in told.items()}
            self.spans.event(moved.ref, "move failed" if moved.reason else "moved", fields)
        self._moved.labels("failed" if moved.reason else "done").inc()
        canonical(
            _log,
            "move",
            ref=str(moved.ref),
            **told,
            failed=moved.reason or None,
            rounds=moved.rounds,
            rehearsed_tokens=moved.rehearsed_tokens,
            moved_bytes=moved.moved_bytes,
            late_bytes=moved.late_bytes or None,
            fallback=moved.fallback or None,
            prepare_s=round(moved.prepare_s, 4),
            switch_s=round(moved.switch_s, 4),
        )

    def _leave(self, left: effects.SequenceLeft) -> None:
        became, reason = str(left.phase), left.finish_reason and str(left.finish_reason)
        told: dict[str, Any] = {
            "prompt_tokens": left.prompt_tokens,
            "generated_tokens": left.generated_tokens,
            "expected_tokens": left.expected_tokens,
        }
        self._note(
            "left",
            left.ref,
            became=became,
            reason=reason or "",
            worker=left.worker_id or "",
            **told,
            queued_s=left.queued_s,
            total_s=left.total_s,
        )
        if self.spans is not None:
            self.spans.left(left)
        self._left.labels(left.phase).inc()
        self._waits[bisect_left(WAIT_BOUNDS_S, left.queued_s)] += 1
        self._waited_s += max(0.0, left.queued_s)
        if left.worker_id is not None and left.held_s > 0:
            self._count_service(left)
        detail(
            _log,
            "sequence",
            ref=str(left.ref),
            became=became,
            reason=reason,
            worker=left.worker_id,
            tenant=left.tenant.name or None,
            cached_tokens=left.cached_tokens or None,
            **told,
            queued_s=round(left.queued_s, 4),
            total_s=round(left.total_s, 4),
        )

    def _count_service(self, left: effects.SequenceLeft) -> None:
        """Count a finished sequence that had started."""
        generated, cached = left.generated_tokens or 0, min(left.cached_tokens, left.prompt_tokens)
        if left.expected_tokens is not None:
            expected = min(left.expected_tokens, left.prompt_tokens)
            hits = (left.prompt_tokens, expected, cached, abs(expected - cached))
            self.hits = {name: self.hits[name] + found for name, found in zip(_HITS, hits, strict=True)}
        name = _row_of(left.tenant.name, self._services)
        computed, kv_token_s = left.prompt_tokens - cached, (left.prompt_tokens + generated / 2) * left.held_s
        service = self._services.setdefault(name, dict.fromkeys(_SERVICE, 0))
        for part, amount in zip(_SERVICE, (1, computed, cached, generated, kv_token_s), strict=True):
            service[part] += amount
        for kind, tokens in (("computed", computed), ("cached", cached), ("generated", generated)):
            self._tokens.labels(name, kind).inc(tokens)
        self._kv.labels(name).inc(kv_token_s)


def _row_of(tenant: str, rows: Collection[str]) -> str:
    """Return the tenant's row name, a shared one if there are too many rows."""
    name = tenant or "-"
    return "(others)" if name not in rows and len(rows) >= _MOST_TENANTS else name


def _rounded(costs_s: dict[str, float]) -> dict[str, float]:
    return {name: round(each_s, 4) for name, each_s in costs_s.items()}
