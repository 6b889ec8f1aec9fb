"""What the gateway knows of the others from their heartbeats.

Pure: no bus, no clock; `now_s` is passed in.
"""

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
"""What the supervisor said is believed for so long: some of its turns."""


@dataclass(slots=True)
class WorkerView:
    """One worker as its last heartbeat described it."""

    start: Start
    model: str
    max_context_tokens: int
    report: WorkerReported


class StepSums:
    """What the steps of all workers of a model were like, of all their starts that were heard of."""

    def __init__(self) -> None:
        self.tokens = 0
        self.by_tokens = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self.prefill_s = self.inference_s = 0.0
        self.by_prefill = [0] * (len(WAIT_BOUNDS_S) + 1)
        self.by_inference = [0] * (len(WAIT_BOUNDS_S) + 1)

    def add(self, now: StepsReport, before: StepsReport) -> None:
        """What came between two reports of one start of one worker."""
        self.tokens += max(0, now.tokens - before.tokens)
        self.prefill_s += max(0.0, now.prefill_s - before.prefill_s)
        self.inference_s += max(0.0, now.inference_s - before.inference_s)
        _add(self.by_tokens, now.by_tokens, before.by_tokens)
        _add(self.by_prefill, now.by_prefill, before.by_prefill)
        _add(self.by_inference, now.by_inference, before.by_inference)


def _add(sums: list[int], now: Sequence[int], before: Sequence[int]) -> None:
    """Counts only rise; one that the sender's version does not have is 0."""
    for at, count in enumerate(now[: len(sums)]):
        sums[at] += max(0, count - (before[at] if at < len(before) else 0))


class WorkerTable:
    """The workers heard of lately, and the context that each of `models` can be offered."""

    def __init__(self, models: Collection[str], timeout_s: float) -> None:
        self._models = frozenset(models)
        self._workers: dict[str, WorkerView] = {}
        self._last_context_tokens: dict[str, int] = {}
        self._liveness = Liveness(timeout_s, return_s=timeout_s)
        self.steps = {model: StepSums() for model in models}
        """By model."""
        self._counted: dict[str, tuple[Start, StepsReport]] = {}
        """What `steps` has of each worker, also of those that are silent: they may come back."""

    def on_report(self, report: WorkerReported, now_s: float) -> Start | None:
        """Takes a heartbeat in. Returns the run of that worker which this one's start has ended, if any."""
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
        """The scheduler has given that run up. Another heartbeat of it brings it back."""
        known = self._workers.get(start[0])
        if known is not None and known.start == start:
            del self._workers[start[0]]
            self._liveness.forget(start[0])
            self._remember(known.model)

    def on_tick(self, now_s: float) -> list[Start]:
        """The workers that have been silent too long; they are forgotten."""
        lost = [self._workers.pop(worker_id) for worker_id in self._liveness.silent(now_s)]
        for model in {view.model for view in lost}:
            self._remember(model)
        return [view.start for view in lost]

    @property
    def serving(self) -> int:
        """How many workers serve any of the models."""
        return sum(view.model in self._models for view in self._workers.values())

    def absence(self, model: str) -> str:
        """Why nobody serves the model, in words; to be asked when nobody does."""
        others = sorted({(view.start[0], view.model) for view in self._workers.values()})
        told = ", ".join(f"{worker_id} serves {model!r}" for worker_id, model in others)
        advice = f"; {told}: give gateway and workers the same served_name" if told else ""
        return f"no worker serves {model!r}{advice}"

    def context_tokens(self, model: str) -> int | None:
        """Longest prompt + answer any worker of the model can hold, or could when last one was there; None
        before the first.
        """
        return self._most_context(model) or self._last_context_tokens.get(model)

    def reports(self) -> list[WorkerReported]:
        """The latest of each worker, in the order of their names' numbers."""
        return sorted((view.report for view in self._workers.values()), key=_by_number)

    def unheard_s(self, worker_id: str, now_s: float) -> float:
        """Since a worker's latest heartbeat."""
        return self._liveness.unheard_s(worker_id, now_s)

    def rows(self, now_s: float) -> list[dict[str, object]]:
        """For people to read."""
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
        """Raises AssertionError when the table contradicts itself."""
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
    """What the supervisor says is wrong with the stack."""

    def __init__(self) -> None:
        self._troubles: tuple[str, ...] = ()
        self._heard_s = float("-inf")

    def on_verdict(self, event: StackVerdict, now_s: float) -> None:
        self._troubles, self._heard_s = event.troubles, now_s

    def troubles(self, now_s: float) -> tuple[str, ...] | None:
        """None where no supervisor has said anything lately, as in containers."""
        return self._troubles if now_s - self._heard_s < _VERDICT_S else None


class SchedulerView:
    """The scheduler in charge, as far as is known here."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._incarnation = 0
        self._epoch = -1
        self._heard_s: float | None = None
        self.scheduler_id: str | None = None
        self.policy = ""
        self.queued = 0
        """Sequences without a worker, as it said last; and those that a worker has."""
        self.running = 0
        self.queued_by_model: dict[str, int] = {}
        self.preemptions = 0
        """In its term."""
        self.preemptions_total = 0
        """In all terms heard of, as what follows."""
        self.waits = [0] * (len(WAIT_BOUNDS_S) + 1)
        """How long sequences waited for their first plan, counted by `WAIT_BOUNDS_S`."""
        self.waited_s = 0.0
        self._counted: SchedulerAnnounced | None = None
        self.hit_tokens: dict[str, int] = {}
        """Of prompts, in its term: placed, expected to be cached, found, and wrongly expected."""

    def on_announced(self, event: SchedulerAnnounced, now_s: float) -> bool:
        """True when this is another scheduler than before: what is running has to be submitted to it.

        One of an earlier epoch is not listened to for as long as the later one is heard of.
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
        """Adds what came since the last announcement of the same term."""
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
        """Heard of lately."""
        return self._heard_s is not None and now_s - self._heard_s <= self._timeout_s
