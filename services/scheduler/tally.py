"""What was planned, counted: for metrics and for `status`."""

from typing import Any

from prometheus_client import Counter

from shared import metrics
from shared.messages.plans import BatchPlan


class PlanTally:
    """Metrics are of the process; `describe` is of the one term that the tally belongs to."""

    def __init__(self) -> None:
        self._counters: dict[str, Counter] = {
            "plans": metrics.counter("kvasir_scheduler_plans_total", "Plans sent"),
            "steps": metrics.counter("kvasir_scheduler_planned_steps_total", "Steps planned"),
            "superseding": metrics.counter(
                "kvasir_scheduler_superseding_plans_total", "Plans that cut earlier ones short"
            ),
            "starts": metrics.counter("kvasir_scheduler_starts_total", "Sequences started at a worker"),
            "preemptions": metrics.counter("kvasir_scheduler_preemptions_total", "Sequences preempted"),
            "prefill_tokens": metrics.counter(
                "kvasir_scheduler_planned_prefill_tokens_total", "Prompt tokens planned"
            ),
        }
        self._counts = dict.fromkeys(self._counters, 0)

    def count(self, plan: BatchPlan) -> None:
        """One plan that is sent."""
        for name, amount in (
            ("plans", 1),
            ("steps", plan.steps),
            ("superseding", int(plan.supersedes)),
            ("starts", len(plan.starts)),
            ("preemptions", len(plan.preemptions)),
            ("prefill_tokens", sum(chunk.end_token - chunk.first_token for chunk in plan.prefills)),
        ):
            self._counts[name] += amount
            self._counters[name].inc(amount)

    def describe(self) -> dict[str, Any]:
        """The counts of this term."""
        return dict(self._counts)
