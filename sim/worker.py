"""A simulated worker: runs plans step by step, with as few events as possible.

Plans are made ahead and cut short by the rules of the live scheduler
(`services/scheduler/core/worker_pipeline.py`). The next plan is requested while fewer than
`outstanding_steps` steps are outstanding. With 2, the live value, a plan cannot see which sequences end in
the step that is running. With 1, plans are made at step boundaries with full knowledge. A step is outstanding
until a live worker would have reported it. A live worker reports the step after which the next plan is due,
and the last step. It also reports steps in which a sequence ended or an item was skipped.

A *stretch* is a run of equal steps of one plan in which no sequence ends and nothing is reported. It is one
event, whatever its length.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil

from services.scheduler.policy.contract import BatchPolicy, PlannedBatch, PlannedPrefill
from services.worker.core.costs import CostModel, split_singles
from sim.books import Held, WorkerBooks
from sim.cores import SharedCores
from sim.meters import WorkerMeter

MAX_OUTSTANDING_PLANS = 4
_LEAST_FOLLOWED, _MOST_FOLLOWED = 0.3, 3.0
"""Bounds on a recorded step's duration, as multiples of the duration that the cost model predicts."""


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """A plan that has not started."""

    batch: PlannedBatch
    report_at: int
    """The first step that is always reported."""


@dataclass(slots=True, eq=False)
class Running:
    """The plan that is running."""

    sent: Sent
    prefills: list[tuple[Held, PlannedPrefill]]
    decodes: list[Held]
    has_skips: bool
    """An item was void, so the first step is reported."""
    steps_done: int = 0
    steps_reported: int = 0

    @property
    def batch(self) -> PlannedBatch:
        return self.sent.batch

    def reported_of(self, steps_done: int) -> int:
        """Return how many of `steps_done` steps are reported, if nothing ended after step
        `self.steps_done`."""
        if steps_done >= self.sent.report_at:
            return max(self.steps_reported, self.sent.report_at)
        return max(self.steps_reported, int(self.has_skips and steps_done > 0))


@dataclass(slots=True, eq=False)
class Stretch:
    """Steps computed as one event."""

    start_s: float
    ends_s: list[float]
    """End time of each step."""
    serial: int


@dataclass(slots=True, eq=False)
class SimWorker:
    """A worker's books, plans and policy. The driver calls `advance` at the end of each stretch."""

    policy: BatchPolicy
    books: WorkerBooks
    cost: CostModel
    meter: WorkerMeter
    outstanding_steps: int = 2
    ahead_s: float = 0.0
    """Where steps are short, plan this many seconds ahead; an arrival may cut such plans short."""
    is_urgent: bool = False
    """A request arrived, so a long plan may be cut short."""
    on_begin: Callable[[Held], None] = lambda held: None
    """Called for each sequence whose prefill is about to begin, before the step is timed."""
    followed_s: Sequence[float] = ()
    """End times of recorded steps; a step that ends close to one of them ends with it."""
    cores: SharedCores | None = None
    number: int = 0
    """Number of this worker on `cores`."""
    left: list[Held] = field(default_factory=list)
    """Sequences handed over that the driver has not yet taken."""
    _plans: deque[Sent] = field(default_factory=deque)
    _running: Running | None = None
    _stretch: Stretch | None = None
    _serial: int = 0
    _is_left: bool = False
    """A sequence is due to leave after the running step."""
    _cut: bool = False
    """The running plan ends with the current step, and the newest plan follows."""

    def stretch_end(self) -> tuple[float, int] | None:
        """Return the end of the current stretch and its serial number; older serial numbers are void."""
        return None if self._stretch is None else (self._stretch.ends_s[-1], self._stretch.serial)

    def is_current(self, serial: int) -> bool:
        return self._stretch is not None and self._stretch.serial == serial

    def next_plans(self, now_s: float) -> list[PlannedBatch]:
        """Return new plans from the policy until enough steps are outstanding; start one if none runs."""
        made = []
        while not self._cut and len(self._plans) + (self._running is not None) < MAX_OUTSTANDING_PLANS:
            steps = self._outstanding(now_s)
            cuttable = self.is_urgent and steps > self.outstanding_steps and self._is_pliable
            if steps >= self._steps_ahead() and not cuttable:
                break
            self.is_urgent = False
            batch = self.meter.time_plan(self.policy, now_s)
            if batch is None:
                break
            made.append(batch)
            if cuttable and batch.prefills and not batch.preemptions:
                self._cut_short(now_s)
            self._plans.append(Sent(batch, max(1, batch.steps + 1 - self._most_steps_ahead())))
        if self._running is None:
            self._start_plan(now_s)
        return made

    def may_plan(self, now_s: float) -> bool:
        """Return False if `next_plans` would do nothing."""
        if self._running is None or self.is_urgent:
            return True
        is_full = self._cut or len(self._plans) + 1 >= MAX_OUTSTANDING_PLANS
        return not is_full and self._outstanding(now_s) < self._steps_ahead()

    def _outstanding(self, now_s: float) -> int:
        """Return the number of steps that have not been reported."""
        steps = sum([sent.batch.steps for sent in self._plans])
        running, stretch = self._running, self._stretch
        if running is not None and stretch is not None:
            done = running.steps_done + bisect_right(stretch.ends_s, now_s)
            steps += running.batch.steps - running.reported_of(done)
        return steps

    @property
    def _is_pliable(self) -> bool:
        """Whether every outstanding plan may end between any two steps."""
        if self._running is not None and not self._running.sent.batch.decodes_only:
            return False
        return all(sent.batch.decodes_only for sent in self._plans)

    def _steps_ahead(self) -> int:
        return self._most_steps_ahead() if self.ahead_s and self._is_pliable else self.outstanding_steps

    def _most_steps_ahead(self) -> int:
        step_s = self.meter.told_decode_step_s
        if step_s <= 0 or not self.ahead_s:
            return self.outstanding_steps
        most = min(self.books.settings.max_steps, ceil(self.ahead_s / step_s))
        return max(self.outstanding_steps, most)

    def _cut_short(self, now_s: float) -> None:
        """End the running plan with the current step and drop every queued plan except the next one."""
        assert self._running is not None
        assert self._stretch is not None
        ends_s = self._stretch.ends_s
        self._stretch.ends_s = ends_s[: bisect_right(ends_s, now_s) + 1]
        self._renew_serial(self._stretch)
        self._cut = True

    def _renew_serial(self, stretch: Stretch) -> None:
        self._serial += 1
        stretch.serial = self._serial

    def _start_plan(self, now_s: float) -> None:
        """Start the next plan that has a valid item; a plan that only preempts takes no time."""
        while self._plans:
            sent = self._plans.popleft()
            prefills, decodes = self.books.apply(sent.batch)
            if prefills or decodes:
                planned = len(sent.batch.prefills) + len(sent.batch.decodes)
                has_skips = len(prefills) + len(decodes) < planned
                for held, item in prefills:
                    if item.first_token == 0:
                        self.on_begin(held)
                self._running = Running(sent, prefills, decodes, has_skips)
                self._start_stretch(now_s)
                return

    def _start_stretch(self, now_s: float) -> None:
        """Start a stretch of equal steps that ends at the latest with the next reported step."""
        running = self._running
        assert running is not None
        due = running.sent.report_at if running.steps_done < running.sent.report_at else running.batch.steps
        decodes, step_s = running.decodes, self.cost.step_s
        steps = 1
        if not running.prefills and not (running.has_skips and running.steps_done == 0):
            left = [held.record.request.output_tokens - held.generated_tokens for held in decodes]
            steps = min(due - running.steps_done, *left)
        parts = [(_begins(held, item), item.end_token) for held, item in running.prefills]
        chunks, count, context_tokens = split_singles(parts)
        count += len(decodes)
        context_tokens += sum([held.computed_tokens for held in decodes]) + len(decodes)
        durations_s = [step_s(chunks, count, context_tokens + step * count) for step in range(steps)]
        if self.cores is not None:
            ends_s = self.cores.ends_s(self.number, durations_s, now_s)
        elif self.followed_s:
            ends_s = self._followed(durations_s, now_s)
        else:
            ends_s = list(accumulate(durations_s, initial=now_s))[1:]
        self._serial += 1
        self._stretch = Stretch(now_s, ends_s, self._serial)

    def _followed(self, durations_s: Sequence[float], now_s: float) -> list[float]:
        """Return the end time of each step: a recorded one if close enough, else by the cost model."""
        ends_s, begin_s = [], now_s
        for duration_s in durations_s:
            at = bisect_left(self.followed_s, begin_s + _LEAST_FOLLOWED * duration_s)
            is_there = at < len(self.followed_s)
            if is_there and self.followed_s[at] <= begin_s + _MOST_FOLLOWED * duration_s:
                begin_s = self.followed_s[at]
            else:
                begin_s += duration_s
            ends_s.append(begin_s)
        return ends_s

    def chunks(self) -> tuple[float, list[tuple[Held, int]]]:
        """Return the start of the current stretch and its prefills, each with its number of tokens."""
        if self._running is None or self._stretch is None:
            return 0.0, []
        parts = [(held, item.end_token - item.first_token) for held, item in self._running.prefills]
        return self._stretch.start_s, parts

    def advance(self, now_s: float) -> list[Held]:
        """End the current stretch and return the sequences that ended with it. The policy is told first of
        the ended sequences, then of the steps that a cut plan did not run."""
        running, stretch = self._running, self._stretch
        assert running is not None
        assert stretch is not None
        steps = len(stretch.ends_s)
        chunks = [(_begins(held, item), item.end_token) for held, item in running.prefills]
        chunk_tokens = sum(end - first for first, end in chunks)
        preceding_tokens = sum((end * end - first * first) // 2 for first, end in chunks)
        took_s = now_s - stretch.start_s
        self.meter.on_stretch(self.books, chunk_tokens, len(running.decodes), steps, took_s, preceding_tokens)
        prompts, decodes = [held for held, _ in running.prefills], len(running.decodes)
        ended = self._account(running, stretch.start_s, now_s, steps)
        if self.cores is not None:
            begun = [held for held in prompts if held.record.first_token_s == now_s]
            late_s = self.cores.emit(stretch.ends_s, decodes + len(begun), now_s)
            for held in begun:
                held.record.first_late_s = late_s
            for held in ended:
                held.record.end_late_s = late_s
        for held in ended:
            self.books.end(held)
            self.policy.on_ended(held.record.request.key, now_s, held.generated_tokens)
        if ended and len(self.books.held) + len(ended) > len(running.decodes) + len(prompts):
            self.is_urgent = True  # a request waits for the room
        if self._is_left:
            self._let_go(running, now_s)
        running.steps_done += steps
        reported = running.steps_done if ended else running.reported_of(running.steps_done)
        running.steps_reported = reported
        self.meter.tell(self.policy, now_s)
        self._after_stretch(running, bool(ended), now_s)
        return ended

    def _account(self, running: Running, start_s: float, now_s: float, steps: int) -> list[Held]:
        ended = []
        for held, item in running.prefills:
            is_over = item.end_token == held.prefill_tokens
            self.meter.on_prefill(held, start_s, now_s, is_over)
            self.books.compute(held, item.end_token, 1 if is_over else 0)
            if is_over:
                held.is_decoding, held.was_evicted = True, False
                if held.remaining_tokens == 0:
                    ended.append(held)
        ended += self._decode(running.decodes, start_s, now_s, steps)
        for held in ended:
            held.record.end_s = now_s
        return ended

    def _decode(self, decodes: Sequence[Held], start_s: float, end_s: float, steps: int) -> list[Held]:
        """Count `steps` equal decode steps; return the sequences that end with them. A hot path."""
        ended, resumed, took_s = [], 0, end_s - start_s
        step_s = took_s / steps
        for held in decodes:
            record = held.record
            if held.ran_until_s != start_s or not held.has_decoded:
                self.meter.on_resumed(held, start_s, end_s, step_s)
                resumed += 1
            record.decode_s += took_s
            held.ran_until_s = held.token_s = end_s
            held.computed_tokens += steps
            generated_tokens = held.generated_tokens = held.generated_tokens + steps
            if generated_tokens == record.request.output_tokens:
                ended.append(held)
        self.books.computed_tokens += steps * len(decodes)
        if gaps := steps * len(decodes) - resumed:
            self.meter.note_gaps(end_s, step_s, gaps)
        return ended

    def _let_go(self, running: Running, now_s: float) -> None:
        """Hand over the sequences that are due to leave after this step."""
        self._is_left = False
        for held in [*(held for held, _ in running.prefills), *running.decodes]:
            if held.goes_to is not None and held.remaining_tokens > 0 and held.is_decoding:
                self.hand_over(held, now_s)

    def hand_over(self, held: Held, now_s: float) -> None:
        """Remove a sequence that continues at another worker; the result of a running step is discarded."""
        self.books.end(held)
        self.policy.on_ended(held.record.request.key, now_s)
        self.left.append(held)
        if self._running is not None:
            self._running.decodes = [one for one in self._running.decodes if one is not held]

    def can_leave(self, held: Held) -> bool:
        """Whether the sequence can leave now: it is not decoding in the stretch, or the stretch is one
        step with prefills."""
        running = self._running
        return running is None or held not in running.decodes or bool(running.prefills)

    def _after_stretch(self, running: Running, ended: bool, now_s: float) -> None:
        """Continue this plan or start the next one. Only a plan's first step has prefills."""
        running.prefills = []
        if ended:
            running.decodes = [held for held in running.decodes if held.remaining_tokens > 0]
        self._stretch = None
        if self._cut:
            self._report_cut(running, now_s)
        elif running.decodes and running.steps_done < running.batch.steps:
            self._start_stretch(now_s)
            return
        self._running = None
        self._start_plan(now_s)

    def end_after_step(self, now_s: float) -> None:
        """End the current stretch with the running step, so that a sequence can leave; its plan continues."""
        self._is_left = True
        if self._stretch is not None:
            ends_s = self._stretch.ends_s
            self._stretch.ends_s = ends_s[: bisect_right(ends_s, now_s) + 1]
            self._renew_serial(self._stretch)

    def _report_cut(self, running: Running, now_s: float) -> None:
        """Keep only the newest plan, and tell the policy which decodes the others did not run."""
        self._cut = False
        newest = self._plans.pop()
        dropped = [(running.batch, running.steps_done), *((sent.batch, 0) for sent in self._plans)]
        self._plans.clear()
        self._plans.append(newest)
        for batch, steps_done in dropped:
            for item in batch.decodes:
                missing_tokens = item.tokens - min(item.tokens, steps_done)
                if missing_tokens:
                    self.policy.on_short(item.key, missing_tokens, now_s)


def _begins(held: Held, item: PlannedPrefill) -> int:
    """Return the first token of a chunk to compute: cached tokens are skipped, except the chunk's last."""
    return min(max(item.first_token, held.cached_tokens), item.end_token - 1)
