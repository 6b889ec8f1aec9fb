"""State of workers, supervisor and scheduler, from their heartbeats. Pure; `now_s` is passed in."""

from collections import Counter
from collections.abc import Collection, Sequence

from shared.liveness import Liveness, Start
from shared.messages.reports import (
    STEP_TOKEN_BOUNDS,
    WAIT_BOUNDS_S,
    SchedulerAnnounced,
    ShardLoad,
    StackVerdict,
    StepsReport,
    WorkerReported,
)
from shared.shards import MOST_SHARDS

_VERDICT_S = 15.0
"""Seconds that the supervisor's report is valid; several of its rounds."""


class StepSums:
    """Sums of step statistics over all workers of a model, across restarts."""

    def __init__(self) -> None:
        self.tokens = 0
        self.by_tokens = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self.prefill_s = self.inference_s = 0.0
        self.by_prefill = [0] * (len(WAIT_BOUNDS_S) + 1)
        self.by_inference = [0] * (len(WAIT_BOUNDS_S) + 1)

    def add(self, now: StepsReport, before: StepsReport) -> None:
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
        self._workers: dict[str, WorkerReported] = {}
        self._contexts = {model: Counter[int]() for model in models}
        """Number of workers by context length, for each model."""
        self._last_context_tokens: dict[str, int] = {}
        self._adapters = {model: Counter[str]() for model in models}
        """Number of workers by adapter, for each model."""
        self._liveness = Liveness(timeout_s, return_s=timeout_s)
        self.steps = {model: StepSums() for model in models}
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
        self._workers[report.worker_id] = report
        self._count(known, report)
        return None if known is None or known.incarnation == start[1] else (start[0], known.incarnation)

    def on_lost(self, start: Start) -> None:
        """Remove a run that the scheduler gave up; a later heartbeat restores it."""
        known = self._workers.get(start[0])
        if known is not None and known.incarnation == start[1]:
            del self._workers[start[0]]
            self._liveness.forget(start[0])
            self._count(known, None)

    def on_tick(self, now_s: float) -> list[Start]:
        """Remove and return the workers that have become silent."""
        lost = [self._workers.pop(worker_id) for worker_id in self._liveness.silent(now_s)]
        for report in lost:
            self._count(report, None)
        return [(report.worker_id, report.incarnation) for report in lost]

    @property
    def serving(self) -> int:
        """Number of workers that serve any of the models."""
        return sum(contexts.total() for contexts in self._contexts.values())

    def absence(self, model: str) -> str:
        """Return the error text for a model without workers."""
        told = ", ".join(f"{name} serves {report.model!r}" for name, report in sorted(self._workers.items()))
        advice = f"; {told}: give gateway and workers the same served_name" if told else ""
        return f"no worker serves {model!r}{advice}"

    def context_tokens(self, model: str) -> int | None:
        """Return the longest context of the model's workers, or the last known; None before the first."""
        return self._last_context_tokens.get(model)

    def adapters(self, model: str) -> Collection[str] | None:
        """Return the adapters of the model's workers, or the last known; None before the first worker."""
        if model not in self._last_context_tokens:
            return None
        return +self._adapters[model] if self._contexts[model] else self._adapters[model]

    def reports(self) -> list[WorkerReported]:
        """Return the latest report of each worker, ordered by number."""
        return sorted(self._workers.values(), key=_by_number)

    def unheard_s(self, worker_id: str, now_s: float) -> float:
        return self._liveness.unheard_s(worker_id, now_s)

    def rows(self, now_s: float) -> list[dict[str, object]]:
        return [
            {
                "worker": name,
                "model": report.model,
                "max_context_tokens": report.max_context_tokens,
                "heard_s_ago": round(self.unheard_s(name, now_s), 2),
            }
            for name, report in self._workers.items()
        ]

    def check_integrity(self) -> None:
        assert self._workers.keys() == set(self._liveness)
        for model, contexts in self._contexts.items():
            reports = [report for report in self._workers.values() if report.model == model]
            assert contexts == Counter(report.max_context_tokens for report in reports)

    def _count(self, before: WorkerReported | None, now: WorkerReported | None) -> None:
        """Replace a worker's report in the counts; heartbeats do not cost more with more workers."""
        for report, more in ((now, 1), (before, -1)):
            if report is not None and (contexts := self._contexts.get(report.model)) is not None:
                contexts[report.max_context_tokens] += more
                self._adapters[report.model].update(dict.fromkeys(report.adapters, more))
                if not contexts[report.max_context_tokens]:
                    del contexts[report.max_context_tokens]
                if contexts:
                    self._last_context_tokens[report.model] = max(contexts)


def _by_number(report: WorkerReported) -> tuple[str, int, str]:
    stem, _, number = report.worker_id.rpartition("-")
    return (stem, int(number), "") if number.isdecimal() else (stem, -1, number)


class StackView:
    """Problems with the stack, as the supervisor reports them."""

    def __init__(self) -> None:
        self._troubles: tuple[str, ...] = ()
        self._short_of: tuple[str, ...] = ()
        self._heard_s = float("-inf")

    def on_verdict(self, event: StackVerdict, now_s: float) -> None:
        self._troubles, self._short_of, self._heard_s = event.troubles, event.short_of, now_s

    def troubles(self, now_s: float) -> tuple[str, ...] | None:
        """Return the problems; None without a recent report, as in containers."""
        return self._troubles if now_s - self._heard_s < _VERDICT_S else None

    def shortages(self, now_s: float) -> tuple[str, ...]:
        """Return what delays requests; empty without a recent report."""
        return self._short_of if now_s - self._heard_s < _VERDICT_S else ()


_NO_LOAD = ShardLoad()
_NOTHING = SchedulerAnnounced(scheduler_id="none", incarnation=0, epoch=0, policy="")


class SchedulerView:
    """The current scheduler's announcements."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._incarnation = 0
        self._epoch = -1
        self._heard_s: float | None = None
        self.scheduler_id: str | None = None
        self.said = _NOTHING
        """The last announcement; its counts are those of the current term."""
        self.preemptions_total = 0
        """Over all terms, as are `waits` and `waited_s`."""
        self.waits = [0] * (len(WAIT_BOUNDS_S) + 1)
        self.waited_s = 0.0

    def on_announced(self, event: SchedulerAnnounced, now_s: float) -> bool:
        """Process an announcement; return True for a new scheduler, which needs all running sequences. An
        earlier epoch is ignored while the later scheduler is present."""
        if event.epoch < self._epoch and self.is_present(now_s):
            return False
        is_new = (event.scheduler_id, event.incarnation) != (self.scheduler_id, self._incarnation)
        self.scheduler_id, self._incarnation, self._epoch = event.scheduler_id, event.incarnation, event.epoch
        self._heard_s = now_s
        self._count(event, self.said if event.incarnation == self.said.incarnation else _NOTHING)
        self.said = event
        return is_new

    @property
    def hit_tokens(self) -> dict[str, int]:
        """Prompt tokens in the current term: placed, expected in cache, found, and wrongly expected."""
        said = self.said
        found = (said.placed_prompt_tokens, said.hits_expected_tokens, said.hits_found_tokens)
        return dict(
            zip(("placed", "expected", "found", "error"), (*found, said.hits_error_tokens), strict=True)
        )

    def load(self, model: str) -> ShardLoad:
        """Return the announced load of a model's workers; "" names the only model."""
        loads = self.said.loads
        return loads.get(model) or (next(iter(loads.values())) if len(loads) == 1 and not model else _NO_LOAD)

    def _count(self, event: SchedulerAnnounced, before: SchedulerAnnounced) -> None:
        """Add the increase since the last announcement of the same term."""
        self.preemptions_total += max(0, event.preemptions - before.preemptions)
        self.waited_s += max(0.0, event.waited_s - before.waited_s)
        _add(self.waits, event.waits, before.waits)

    def is_present(self, now_s: float) -> bool:
        return self._heard_s is not None and now_s - self._heard_s <= self._timeout_s

    def leave(self) -> None:
        """Count the scheduler as away until its next announcement."""
        self._heard_s = None


class ShardViews:
    """The current scheduler of each shard, and the shard for a new sequence."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.views = [SchedulerView(timeout_s)]
        """By shard."""
        self._sent: Counter[tuple[int, str]] = Counter()
        """Sequences sent to a shard's workers of a model since its last announcement."""

    def on_announced(self, event: SchedulerAnnounced, now_s: float) -> Collection[int]:
        """Process an announcement; return the shards that need their running sequences. A smaller number of
        shards is ignored while a scheduler with the larger one is present."""
        count = len(self.views)
        is_stale = event.shards < count and self.is_present(now_s)
        if is_stale or not event.shard < event.shards <= MOST_SHARDS:
            return ()
        if event.shards != count:
            self.views = [SchedulerView(self._timeout_s) for _ in range(event.shards)]
        is_new = self.views[event.shard].on_announced(event, now_s)
        for model in event.loads:
            del self._sent[event.shard, model]
        return (event.shard,) if is_new else ()

    def pick(self, model: str, limit_tokens: int, now_s: float) -> int:
        """Return the present shard with the fewest sequences for each worker that can hold this one."""
        views = self.views
        if len(views) == 1:
            return 0

        def cost(shard: int) -> tuple[bool, bool, float]:
            load = views[shard].load(model)
            per_worker = load.per_worker + self._sent[shard, model] / max(1, load.workers)
            return not views[shard].is_present(now_s), limit_tokens > load.context_tokens, per_worker

        shard = min(range(len(views)), key=cost)
        self._sent[shard, model] += 1
        return shard

    def is_present(self, now_s: float) -> bool:
        """Return whether any shard has a scheduler."""
        return any(view.is_present(now_s) for view in self.views)

    def rows(self, now_s: float) -> list[dict[str, object]]:
        """Return one row per shard, for people; none for an undivided fleet."""
        rows: list[dict[str, object]] = [
            {
                "shard": shard,
                "scheduler": view.scheduler_id if view.is_present(now_s) else None,
                "workers": sum(load.workers for load in view.said.loads.values()),
                "queued": view.said.queued,
                "running": view.said.running,
            }
            for shard, view in enumerate(self.views)
        ]
        return rows if len(rows) > 1 else []

    @property
    def scheduler_ids(self) -> str:
        """Return the names of all leaders."""
        return ", ".join(sorted({view.scheduler_id for view in self.views if view.scheduler_id}))

    @property
    def policy(self) -> str:
        return self.views[0].said.policy

    @property
    def queued_by_model(self) -> Counter[str]:
        return sum([Counter(view.said.queued_by_model) for view in self.views], Counter[str]())

    @property
    def hit_tokens(self) -> Counter[str]:
        """Return the sums of all shards (`SchedulerView.hit_tokens`), zeros included."""
        found = Counter[str]()
        for view in self.views:
            found.update(view.hit_tokens)
        return found

    @property
    def waits(self) -> list[int]:
        return [sum(counts) for counts in zip(*(view.waits for view in self.views), strict=True)]

    def total(self, name: str) -> float:
        """Return the sum of an attribute of each view."""
        return float(sum(getattr(view, name) for view in self.views))

    def said(self, name: str) -> int:
        """Return the sum of a count in the latest announcements."""
        return int(sum(getattr(view.said, name) for view in self.views))
