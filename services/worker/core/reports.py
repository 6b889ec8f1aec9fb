"""Numbered reports of a worker's steps, and measurements of their speed. Pure.

`services.worker.core.steps` decides when a report is due. Heartbeats are numbered elsewhere."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from services.worker.core.in_flight import InFlight
from services.worker.core.plans import GivenUpPlan, StepWork
from services.worker.core.sequence import HeldSequence
from services.worker.kv.core.borrowed_pool import Pool
from shared.average import averaged
from shared.messages.plans import EndedSequence, Gained, ShortStart, WorkerStepped
from shared.messages.reports import STEP_TOKEN_BOUNDS, WAIT_BOUNDS_S, StepsReport
from shared.messages.sequence import FinishReason, SequenceRef
from shared.messages.values import as_count, as_seconds


@dataclass(frozen=True, slots=True)
class Identity:
    """A worker's description of itself in every report."""

    worker_id: str
    incarnation: int
    model: str
    max_context_tokens: int
    host: str
    weights: str = ""
    """Digest of the model's configuration, weights and adapters."""
    fingerprint: bytes = b""
    """Must agree for KV to be exchanged; empty: this engine cannot exchange KV."""
    carries: tuple[int, int] = (0, 0)
    """See `engine.contract.Engine`."""
    adapters: tuple[str, ...] = ()


class StepReports:
    """Numbers the reports of one incarnation and counts what was computed since the last one."""

    def __init__(self, identity: Identity, pool: Pool, in_flight: InFlight) -> None:
        """Every report has the free blocks of `pool`, with those that wait for steps in flight."""
        self.last_seq = 0
        self._identity = identity
        self._pool, self._in_flight = pool, in_flight
        self._unreported = [0, 0]
        """Numbers of tokens prefilled and decoded since the last report."""
        self.gains: Counter[SequenceRef] = Counter()
        """Tokens beyond one for each step since the last report."""

    def on_step(self, prefilled_tokens: int, decoded_tokens: int) -> None:
        """Count a step for the next report."""
        self._unreported[0] += prefilled_tokens
        self._unreported[1] += decoded_tokens

    def of_step(
        self, work: StepWork, ended: Iterable[HeldSequence], *, plan_over: bool, step_s: float = 0.0
    ) -> WorkerStepped:
        (prefilled_tokens, decoded_tokens), self._unreported = self._unreported, [0, 0]
        return self._stepped(
            work.queued.plan.epoch,
            work.queued.plan.seq,
            work.queued.steps_done,
            plan_over=plan_over,
            prefilled_tokens=prefilled_tokens,
            decoded_tokens=decoded_tokens,
            step_s=step_s,
            context_tokens=as_count(work.context_tokens) if step_s else 0,
            ended=tuple(
                EndedSequence(
                    ref=sequence.ref,
                    finish_reason=sequence.finish_reason or FinishReason.ERROR,
                    generated_tokens=sequence.generated_tokens,
                )
                for sequence in ended
            ),
            skipped=work.skipped,
            hits=work.hits,
            shorts=work.shorts,
            passed=work.queued.passed_over if plan_over and work.queued.passed else (),
        )

    def between_steps(self, epoch: int, shorts: tuple[ShortStart, ...]) -> WorkerStepped:
        """Return a report between steps, about no plan."""
        return self._stepped(epoch, 0, 0, plan_over=False, shorts=shorts)

    def of_given_up(self, plans: Iterable[GivenUpPlan]) -> tuple[WorkerStepped, ...]:
        return tuple(
            self._stepped(
                plan.epoch,
                plan.seq,
                plan.steps_done,
                plan_over=True,
                outcome=plan.outcome,
                passed=plan.passed,
            )
            for plan in plans
        )

    def _stepped(
        self, epoch: int, plan_seq: int, steps_done: int, *, plan_over: bool, **fields: Any
    ) -> WorkerStepped:
        """Return the next report, with the blocks that plans may count on."""
        self.last_seq += 1
        pool, leaving_blocks = self._pool, self._in_flight.leaving_blocks
        free_blocks = pool.free_blocks + pool.evictable_blocks + leaving_blocks - pool.base.doomed_blocks
        if self.gains:
            fields["gains"] = tuple(Gained(ref=ref, tokens=tokens) for ref, tokens in self.gains.items())
            self.gains.clear()
        return WorkerStepped(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            seq=self.last_seq,
            epoch=epoch,
            plan_seq=plan_seq,
            steps_done=steps_done,
            plan_over=plan_over,
            free_blocks=max(0, free_blocks),
            **fields,
        )


class ValueHistogram:
    """Values so far: their sum, and how many are up to each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.total = 0.0
        self.counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        self.total += value
        self.counts[bisect_left(self._bounds, value)] += 1


class StepTally:
    """Histograms of the steps since the worker started, for heartbeats."""

    def __init__(self) -> None:
        self.tokens = ValueHistogram(STEP_TOKEN_BOUNDS)
        self.first_s, self.last_s = ValueHistogram(WAIT_BOUNDS_S), ValueHistogram(WAIT_BOUNDS_S)
        """Times of first and last tokens since their sequence arrived."""

    def report(self) -> StepsReport | None:
        """None before the first step."""
        if not self.tokens.total:
            return None
        return StepsReport(
            tokens=int(self.tokens.total),
            by_tokens=tuple(self.tokens.counts),
            prefill_s=as_seconds(self.first_s.total),
            by_prefill=tuple(self.first_s.counts),
            inference_s=as_seconds(self.last_s.total),
            by_inference=tuple(self.last_s.counts),
        )


WEIGHT = 0.1
"""Weight of the newest measurement."""
LEAST_PREFILL_TOKENS = 16
"""Least number of prompt tokens for a step to count for prefill speed."""


class SpeedMeter:
    """Prefill speed in tokens/s and time of a decode step in seconds; 0 before the first measurement.
    `prefill_tokens_per_s`: the profile from the start; 0: there was none."""

    def __init__(self, prefill_tokens_per_s: float = 0.0) -> None:
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.prefill_context_tokens = 0.0
        """Mean number of tokens before a prompt token in its sequence."""
        self.decode_step_s = 0.0

    def foreseen_s(self, prefill_tokens: int) -> float:
        """Return the foreseen duration of a step with so many prompt tokens; 0: unknown."""
        if not prefill_tokens or not self.prefill_tokens_per_s:
            return 0.0 if prefill_tokens else self.decode_step_s
        return self.decode_step_s + prefill_tokens / self.prefill_tokens_per_s

    def on_step(
        self, prefilled_tokens: int, decoded_tokens: int, step_s: float, preceding_tokens: int = 0
    ) -> float:
        """Return the seconds that the step's prompt tokens took; 0: unknown. `preceding_tokens`: number of
        tokens before each prompt token, summed up."""
        if prefilled_tokens == 0 and decoded_tokens:
            self.decode_step_s = averaged(self.decode_step_s or None, step_s, WEIGHT)
        elif prefilled_tokens >= LEAST_PREFILL_TOKENS and step_s > 0:
            decoding_s = self.decode_step_s if decoded_tokens else 0.0
            prefill_s = max(step_s - decoding_s, 0.1 * step_s)
            measured = prefilled_tokens / prefill_s
            self.prefill_tokens_per_s = averaged(self.prefill_tokens_per_s or None, measured, WEIGHT)
            context = preceding_tokens / prefilled_tokens
            self.prefill_context_tokens = averaged(self.prefill_context_tokens, context, WEIGHT)
            return prefill_s
        return 0.0
