"""State of workers, supervisor and scheduler, from their heartbeats. Pure; `now_s` is passed in."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shared.liveness import Liveness, Start
from shared.messages.reports import (
    STEP_TOKEN_BOUNDS,
    WAIT_BOUNDS_S,
    SchedulerAnnounced,
    StackVerdict,
    StepsReport,
    WorkerReported,
)

_VERDICT_S = 15.0
"""Seconds that the supervisor's report is valid; several of its rounds."""


@dataclass(slots=True)
class WorkerView:
    """A worker's last heartbeat."""

    start: Start
    model: str
    max_context_tokens: int
    report: WorkerReported


class StepSums:
    """Sums of step statistics over all workers of a model, across restarts."""

    def __init__(self) -> None:
        self.tokens = 0
        self.by_tokens = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self.prefill_s = self.inference_s = 0.0
        self.by_prefill = [0] * (len(WAIT_BOUNDS_S) + 1)
        self.by_inference = [0] * (len(WAIT_BOUNDS_S) + 1)

    def add(self, now: StepsReport, before: StepsReport) -> None:
        """Add the difference between two reports of one run of a worker."""
        self.tokens += max(0, now.tokens - before.tokens)
        self.prefill_s += max(0.0, now.prefill_s - before.prefill_s)
        self.inference_s += max(0.0, now.inference_s - before.inference_s)
        _add(self.by_tokens, now.by_tokens, before.by_tokens)
        _add(self.by_prefill, now.by_prefill, before.by_prefill)
        _add(self.by_inference, now.by_inference, before.by_inference)


def _add(sums: list[int], now: Sequence[int], before: Sequence[int]) -> None:
    """Add increases of counters; a counter that the sender lacks is 0."""
    for at, count in enumerate(now[: len(sums)]):
        sums[at] += max(0, count - (before[at] if at < len(before) else 0))


class WorkerTable:
    """The live workers, and the context length of each of `models`."""

    def __init__(self, models: Collection[str], timeout_s: float) -> None:
        self._models = frozenset(models)
        self._workers: dict[str, WorkerView] = {}
        self._last_context_tokens: dict[str, int] = {}
        self._liveness = Liveness(timeout_s, return_s=timeout_s)
        self.steps = {model: StepSums() for model in models}
        """By model."""
        self._counted: dict[str, tuple[Start, StepsReport]] = {}
        """Last report counted in `steps`, by worker; silent workers may come back."""

    def on_report(self, report: WorkerReported, now_s: float) -> Start | None:
        """Process a heartbeat; return the worker's previous run if this one replaces it."""
        start = (report.worker_id, report.incarnation)
        if not self._liveness.hear(report.worker_id, report.incarnation, now_s):
            return None
        known = self._workers.get(report.worker_id)
        if report.steps is not None and report.model in self._models:
            counted_start, before = self._counted.pop(report.worker_id, (start, StepsReport()))
            self._counted[report.worker_id] = (start, report.steps)
            self.steps[report.model].add(report.steps, before if counted_start == start else StepsReport())
        self._workers[report.worker_id] = WorkerView(start, report.model, report.max_context_tokens, report)
        self._remember(report.model)
        return known.start if known is not None and known.start != start else None

    def on_lost(self, start: Start) -> None:
        """Remove a run that the scheduler gave up; a later heartbeat restores it."""
        known = self._workers.get(start[0])
        if known is not None and known.start == start:
            del self._workers[start[0]]
            self._liveness.forget(start[0])
            self._remember(known.model)

    def on_tick(self, now_s: float) -> list[Start]:
        """Remove and return the workers that have become silent."""
        lost = [self._workers.pop(worker_id) for worker_id in self._liveness.silent(now_s)]
        for model in {view.model for view in lost}:
            self._remember(model)
        return [view.start for view in lost]

    @property
    def serving(self) -> int:
        """Number of workers that serve any of the models."""
        return sum(view.model in self._models for view in self._workers.values())

    def absence(self, model: str) -> str:
        """Return the error text for a model without workers."""
        others = sorted({(view.start[0], view.model) for view in self._workers.values()})
        told = ", ".join(f"{worker_id} serves {model!r}" for worker_id, model in others)
        advice = f"; {told}: give gateway and workers the same served_name" if told else ""
        return f"no worker serves {model!r}{advice}"

    def context_tokens(self, model: str) -> int | None:
        """Return the longest context of the model's workers, or the last known; None before the first."""
        return self._most_context(model) or self._last_context_tokens.get(model)

    def reports(self) -> list[WorkerReported]:
        """Return the latest report of each worker, ordered by number."""
        return sorted((view.report for view in self._workers.values()), key=_by_number)

    def unheard_s(self, worker_id: str, now_s: float) -> float:
        """Return the seconds since the worker's last heartbeat."""
        return self._liveness.unheard_s(worker_id, now_s)

    def rows(self, now_s: float) -> list[dict[str, object]]:
        """Return readable rows, one per worker."""
        return [
            {
                "worker": view.start[0],
                "model": view.model,
                "max_context_tokens": view.max_context_tokens,
                "heard_s_ago": round(self._liveness.unheard_s(view.start[0], now_s), 2),
            }
            for view in self._workers.values()
        ]

    def check_integrity(self) -> None:
        """Raise AssertionError when the table contradicts itself."""
        assert all(view.start[0] == worker_id for worker_id, view in self._workers.items())
        assert self._workers.keys() == set(self._liveness)
        assert self.serving <= len(self._workers)

    def _remember(self, model: str) -> None:
        if model in self._models and (most := self._most_context(model)):
            self._last_context_tokens[model] = most

    def _most_context(self, model: str) -> int:
        views = self._workers.values()
        return max((view.max_context_tokens for view in views if view.model == model), default=0)


def _by_number(report: WorkerReported) -> tuple[str, int, str]:
    stem, _, number = report.worker_id.rpartition("-")
    return (stem, int(number), "") if number.isdecimal() else (stem, -1, number)


class StackView:
    """Problems with the stack, as the supervisor reports them."""

    def __init__(self) -> None:
        self._troubles: tuple[str, ...] = ()
        self._heard_s = float("-inf")

    def on_verdict(self, event: StackVerdict, now_s: float) -> None:
        self._troubles, self._heard_s = event.troubles, now_s

    def troubles(self, now_s: float) -> tuple[str, ...] | None:
        """Return the problems; None without a recent report, as in containers."""
        return self._troubles if now_s - self._heard_s < _VERDICT_S else None


class SchedulerView:
    """The current scheduler's announcements."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._incarnation = 0
        self._epoch = -1
        self._heard_s: float | None = None
        self.scheduler_id: str | None = None
        self.policy = ""
        self.queued = 0
        """Sequences without a worker in the last announcement; `running` have one."""
        self.running = 0
        self.queued_by_model: dict[str, int] = {}
        self.preemptions = 0
        """In the current term."""
        self.preemptions_total = 0
        """Over all terms, as are `waits` and `waited_s`."""
        self.waits = [0] * (len(WAIT_BOUNDS_S) + 1)
        """Histogram of the wait for the first plan, by `WAIT_BOUNDS_S`."""
        self.waited_s = 0.0
        self._counted: SchedulerAnnounced | None = None
        self.hit_tokens: dict[str, int] = {}
        """Prompt tokens in the current term: placed, expected in cache, found, and wrongly expected."""

    def on_announced(self, event: SchedulerAnnounced, now_s: float) -> bool:
        """Process an announcement; return True for a new scheduler, which needs all running sequences.

        An earlier epoch is ignored while the later scheduler is present.
        """
        if event.epoch < self._epoch and self.is_present(now_s):
            return False
        is_new = (event.scheduler_id, event.incarnation) != (self.scheduler_id, self._incarnation)
        self.scheduler_id, self._incarnation, self._epoch = event.scheduler_id, event.incarnation, event.epoch
        self._heard_s = now_s
        self.policy, self.queued, self.running = event.policy, event.queued, event.running
        self.queued_by_model, self.preemptions = dict(event.queued_by_model), event.preemptions
        self._count(event)
        self.hit_tokens = {
            "placed": event.placed_prompt_tokens,
            "expected": event.hits_expected_tokens,
            "found": event.hits_found_tokens,
            "error": event.hits_error_tokens,
        }
        return is_new

    def _count(self, event: SchedulerAnnounced) -> None:
        """Add the increase since the last announcement of the same term."""
        before = self._counted
        if before is None or before.incarnation != event.incarnation:
            before = SchedulerAnnounced(
                scheduler_id=event.scheduler_id, incarnation=event.incarnation, epoch=0, policy=""
            )
        self._counted = event
        self.preemptions_total += max(0, event.preemptions - before.preemptions)
        self.waited_s += max(0.0, event.waited_s - before.waited_s)
        _add(self.waits, event.waits, before.waits)

    def is_present(self, now_s: float) -> bool:
        """Whether the scheduler was heard of recently."""
        return self._heard_s is not None and now_s - self._heard_s <= self._timeout_s
