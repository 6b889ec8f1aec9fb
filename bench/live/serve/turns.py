"""Order of the cells: low load, burst, search for each knee, then 1.2 times the reference's knee
repeatedly. Sides take turns; cells already in the run directory are skipped.
"""

import time
from collections.abc import Mapping
from math import isclose, log
from typing import Any

from bench.kit.context import Context
from bench.kit.stats import order_of
from bench.live.serve import figures
from bench.live.serve.arena import Arena, Level, RateCell, Row, Workload, rows_of
from bench.live.serve.plan import Plan
from bench.live.serve.sides import BASE, OURS, PEER

_STRIDE = 2
_REACH = 48
"""Largest distance in steps from the base rate."""


def nearest_step(rate_per_s: float, base_per_s: float, ratio: float) -> int:
    """Return the step with the nearest rate."""
    return max(-_REACH, min(_REACH, round(log(rate_per_s / base_per_s, ratio))))


def next_step(tried: Mapping[int, bool], first: int) -> int | None:
    """Return the step to try next; None if the knee is between two neighbours or out of reach.

    `tried` maps steps to whether they were sustained. If a step is sustained, lower ones are assumed to be.
    The search moves away from `first` in strides that double.
    """
    low, high = _bracket(tried)
    stride = _STRIDE * 2 ** max(0, len(tried) - 2)
    if low is None and high is None:
        return first
    if high is None:
        assert low is not None
        return None if low >= _REACH else min(_REACH, low + stride)
    if low is None:
        return None if high <= -_REACH else max(-_REACH, high - stride)
    return None if high - low <= 1 else (low + high) // 2


def knee_step(tried: Mapping[int, bool]) -> int | None:
    """Return the highest sustained step below every failed one, or None."""
    return _bracket(tried)[0]


def _bracket(tried: Mapping[int, bool]) -> tuple[int | None, int | None]:
    high = min((step for step, kept in tried.items() if not kept), default=None)
    low = max((step for step, kept in tried.items() if kept and (high is None or step < high)), default=None)
    return low, high


LOW_LOAD = 0.1
_ALL_AT_ONCE_PER_S = 1e4
_BURST_REQUESTS = 200


class Turns:
    """Measures cells until all are known or the budget is spent."""

    def __init__(self, context: Context, plan: Plan, arena: Arena, workload: Workload) -> None:
        self._context, self._plan, self._arena, self._workload = context, plan, arena, workload
        self._known: dict[tuple[str, str, float, int], Row] = rows_of(context.run_dir)
        self._base = plan.sides[0]
        self._end_s = time.monotonic() + plan.budget_s

    @property
    def rows(self) -> list[Row]:
        return list(self._known.values())

    def take(self) -> bool:
        """Run all cells; return whether some were left out for lack of time."""
        try:
            self._reference()
            self._price()
            self._search()
            self._beyond()
        except _BudgetSpent:
            return True
        return False

    def knees(self) -> dict[str, float]:
        """Return the sustained rate of each side whose search has ended with one."""
        if figures.limit_ms(self.rows) is None or not self._has("burst"):
            return {}
        found: dict[str, float] = {}
        for side in self._plan.sides:
            tried = self._tried(side)
            step = knee_step(tried)
            if tried and step is not None and next_step(tried, step) is None:
                found[side] = self._rate(step)
        return found

    def _reference(self) -> None:
        """Measure the burst of every side, and the reference at a tenth of its throughput."""
        plan = self._plan
        for side in plan.sides:
            self._measure(self._burst(side))
        self._measure(self._low(self._base))

    def _price(self) -> None:
        """Measure bare vLLM and our control plane above the same engine, in turns."""
        plan = self._plan
        if not plan.engines or PEER not in plan.sides:
            return
        for turn in range(plan.price_turns):
            for index in order_of(turn, 2):
                side = (PEER, BASE)[index]
                self._measure(self._burst(side, turn))
                self._measure(self._low(side, turn))

    def _burst(self, side: str, repeat: int = 0) -> RateCell:
        return RateCell("burst", side, _ALL_AT_ONCE_PER_S, min(_BURST_REQUESTS, self._plan.requests), repeat)

    def _low(self, side: str, repeat: int = 0) -> RateCell:
        rate_per_s = LOW_LOAD * self._capacity_per_s(self._base)
        return RateCell("low", side, rate_per_s, self._plan.low_requests, repeat)

    def _search(self) -> None:
        """Try one rate of every side that has no knee yet, round by round."""
        turn = 0
        while True:
            wanted = [(side, self._next_step(side)) for side in self._plan.sides]
            left = [(side, step) for side, step in wanted if step is not None]
            if not left:
                return
            for index in order_of(turn, len(left)):
                side, step = left[index]
                for repeat in range(self._plan.repeats):
                    self._measure(RateCell("search", side, self._rate(step), self._plan.requests, repeat))
            turn += 1

    def _beyond(self) -> None:
        knee = self.knees().get(self._base)
        if knee is None:
            return
        sides = sorted(self._plan.sides, key=lambda side: side not in (self._base, OURS))
        rate, requests = figures.BEYOND * knee, self._plan.beyond_requests
        for turn in range(self._plan.alternations):
            for index in order_of(turn, len(sides)):
                self._measure(RateCell("beyond", sides[index], rate, requests, turn))

    def _tried(self, side: str) -> Mapping[int, bool]:
        """Return steps with all repeats, and whether they were sustained."""
        limit = figures.limit_ms(self.rows)
        if limit is None:
            return {}
        by_step: dict[int, list[Row]] = {}
        for row in self.rows:
            if row["kind"] == "search" and row["side"] == side:
                step = self._step(row["rate_per_s"])
                if isclose(self._rate(step), row["rate_per_s"], rel_tol=1e-4):
                    by_step.setdefault(step, []).append(row)
        return {
            step: figures.is_sustained(of_rate, limit)
            for step, of_rate in by_step.items()
            if len(of_rate) >= self._plan.repeats
        }

    def _next_step(self, side: str) -> int | None:
        """Return the next step; the search starts at the side's burst throughput."""
        return next_step(self._tried(side), self._step(self._capacity_per_s(side)))

    def _step(self, rate_per_s: float) -> int:
        return nearest_step(rate_per_s, self._capacity_per_s(self._base), 1 + self._plan.tolerance)

    def _rate(self, step: int) -> float:
        return float(self._capacity_per_s(self._base) * (1 + self._plan.tolerance) ** step)

    def _capacity_per_s(self, side: str) -> float:
        """Return the burst throughput of the first repeat, so that it does not change later."""
        first = self._known[self._burst(side).key]
        return float(first["requests"] / first["wall_s"])

    def _level(self) -> Level | None:
        low = [row for row in self.rows if row["kind"] == "low" and row["side"] == self._base]
        if not low:
            return None
        return Level(low[0]["ttft_ms_p50"] / 1e3, low[0]["itl_ms_p50"] / 1e3, self._plan.slo_scale)

    def _has(self, kind: str) -> bool:
        return any(row["kind"] == kind and row["side"] == self._base for row in self.rows)

    def _measure(self, cell: RateCell) -> None:
        """Measure a cell. Raises _BudgetSpent if it would end too late."""
        if cell.key in self._known:
            return
        expected_s = self._expected_s(cell)
        if time.monotonic() + expected_s > self._end_s:
            raise _BudgetSpent
        row: Any = self._arena.run(cell, self._workload, self._level())
        self._known[cell.key] = row
        kept = "" if row["attained"] is None else f", SLO kept by {row['attained']:.0%}"
        self._context.say(
            f"{cell.kind:7}{cell.side:10}{cell.rate_per_s:8.2f}/s  normalized {row['normalized_ms']:.1f} ms, "
            f"{row['tok_s']:.0f} tok/s{kept}, {row['failures']} failures, {row['wall_s']:.0f} s"
        )

    def _expected_s(self, cell: RateCell) -> float:
        """Return the duration of the arrivals, or of the longest burst; 0 if none is known."""
        bursts = [row["wall_s"] for row in self.rows if row["kind"] == "burst"]
        return max(cell.requests / cell.rate_per_s, max(bursts, default=0.0))


class _BudgetSpent(Exception):
    """The next cell would exceed the budget."""
