"""Meter of one simulated worker: use of time and memory, and the cost of planning.

It also stands in for the live worker's speed meter: it reports prefill and decode speeds to the policy.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter

from services.scheduler.policy.contract import BatchPolicy, PlannedBatch
from sim.books import Held, WorkerBooks

TELL_INTERVAL_S = 0.25
"""Simulated time between heartbeats."""
GAP_S = 0.0005
_WEIGHT = 0.1
_LEAST_PREFILL_TOKENS = 16


@dataclass(slots=True)
class WorkerMeter:
    """Sums over one run. `busy_s` is simulated time; `planning_s` is real time."""

    busy_s: float = 0.0
    steps: int = 0
    forward_tokens: int = 0
    allocated_block_s: float = 0.0
    computed_token_s: float = 0.0
    plans: int = 0
    planning_s: float = 0.0
    longest_plan_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    prefill_context_tokens: float = 0.0
    decode_step_s: float = 0.0
    told_s: float = -1.0
    told_decode_step_s: float = 0.0
    """Value in the latest heartbeat."""
    gaps: Counter[int] = field(default_factory=Counter)
    """Number of inter-token gaps by length, in units of `GAP_S`."""
    warm_s: float = 0.0
    """Gaps before this time are not counted."""

    def time_plan(self, policy: BatchPolicy, now_s: float) -> PlannedBatch | None:
        start_s = perf_counter()
        batch = policy.plan(now_s)
        took_s = perf_counter() - start_s
        self.planning_s += took_s
        self.longest_plan_s = max(self.longest_plan_s, took_s)
        self.plans += 1
        return batch

    def on_stretch(
        self,
        books: WorkerBooks,
        chunk_tokens: int,
        decodes: int,
        steps: int,
        took_s: float,
        preceding_tokens: int = 0,
    ) -> None:
        """Add `steps` equal steps, with the books as they were before them. `preceding_tokens` is the sum,
        over prefill tokens, of the tokens before each."""
        self.busy_s += took_s
        self.steps += steps
        self.forward_tokens += chunk_tokens + decodes * steps
        self.allocated_block_s += books.allocated_blocks * took_s
        self.computed_token_s += (books.computed_tokens + decodes * (steps - 1) / 2) * took_s
        step_s = took_s / steps
        if not chunk_tokens:
            self.decode_step_s = _blend(self.decode_step_s, step_s)
        elif chunk_tokens >= _LEAST_PREFILL_TOKENS:
            prefill_s = max(step_s - (self.decode_step_s if decodes else 0.0), 0.1 * step_s)
            self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, chunk_tokens / prefill_s)
            self.prefill_context_tokens += _WEIGHT * (
                preceding_tokens / chunk_tokens - self.prefill_context_tokens
            )

    def tell(self, policy: BatchPolicy, now_s: float) -> None:
        """Report the measured speeds to the policy, at most once per heartbeat interval."""
        if now_s - self.told_s >= TELL_INTERVAL_S:
            self.told_s, self.told_decode_step_s = now_s, self.decode_step_s
            policy.on_measured(self.prefill_tokens_per_s, self.decode_step_s, now_s)

    def on_prefill(self, held: Held, start_s: float, end_s: float, is_over: bool) -> None:
        """Add a prefill chunk and charge the wait before it to the right part of the latency."""
        record = held.record
        if held.ran_until_s < 0:
            record.queue_s = start_s - record.request.arrival_s
            record.prefill_s += end_s - start_s
        elif held.was_evicted:
            record.preempted_s += end_s - held.ran_until_s
        else:
            record.prefill_s += end_s - held.ran_until_s
        held.ran_until_s = end_s
        if is_over and record.first_token_s < 0:
            record.first_token_s = end_s
        elif is_over:
            self.note_gaps(end_s, end_s - held.token_s, 1)
        if is_over:
            held.token_s = end_s

    def note_gaps(self, now_s: float, gap_s: float, count: int) -> None:
        """Count `count` inter-token gaps of length `gap_s`."""
        if now_s >= self.warm_s:
            self.gaps[round(gap_s / GAP_S)] += count

    def on_resumed(self, held: Held, start_s: float, end_s: float, step_s: float) -> None:
        """Charge the wait before a decode step that does not follow the sequence's last one directly."""
        record, idle_s = held.record, start_s - held.ran_until_s
        self.note_gaps(end_s, start_s - held.token_s + step_s, 1)
        if not held.has_decoded:
            held.has_decoded = True
            record.gt_wait_s += idle_s
        else:
            record.preempted_s += idle_s
            record.pauses += idle_s > 1e-9 and not held.was_evicted


def gap_quantile_s(meters: Iterable[WorkerMeter], share: float) -> float:
    """Return a quantile of the inter-token gaps of all workers; 0 if there are none."""
    gaps: Counter[int] = Counter()
    for meter in meters:
        gaps.update(meter.gaps)
    left = share * gaps.total()
    for gap in sorted(gaps):
        left -= gaps[gap]
        if left <= 0:
            return gap * GAP_S
    return 0.0


def _blend(old: float, new: float) -> float:
    return new if old == 0.0 else (1 - _WEIGHT) * old + _WEIGHT * new
