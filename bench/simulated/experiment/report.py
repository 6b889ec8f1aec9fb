"""The report of an experiment: rankings, latency by rate, and a closing sentence.

A side is a policy with a predictor, a placement and an eviction order. Its knee on a trace is the rate at
which its mean normalized latency exceeds `LIMIT` times the least of any side.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bench.kit.outcome import Table
from bench.kit.stats import mean_interval
from bench.simulated.experiment.grid import LEAST_TURNS, GridCell
from shared.plugins import label

LIMIT = 3.0
"""Multiple of the least normalized latency of a trace."""
_MOST_RATES = 6
"""As many rates as fit into 80 columns."""

Figures = Mapping[str, float]
Results = Sequence[tuple[GridCell, Figures]]
Side = tuple[str, str, str, str]
"""(policy, predictor, placement, eviction)"""


@dataclass(frozen=True)
class TraceReport:
    """Figures of one trace by side and rate, as means over seeds."""

    trace: str
    sides: Mapping[Side, Mapping[float, Figures]]
    limit_s: float

    @property
    def rates(self) -> list[float]:
        return sorted({rate for by_rate in self.sides.values() for rate in by_rate})

    def curve(self, side: Side) -> list[tuple[float, float]]:
        """Return (rate per s, normalized latency in s) pairs."""
        by_rate = self.sides[side]
        return [(rate, by_rate[rate]["normalized_s"]) for rate in sorted(by_rate)]

    def knee(self, side: Side) -> float | None:
        """Return the knee in requests per second: infinite if no rate exceeds the limit, None if all do."""
        return knee_of(self.curve(side), self.limit_s)

    def span(self, side: Side) -> tuple[float, float]:
        """Return the interval of the ranking key; lower is better."""
        by_rate = self.sides[side]
        if len(self.rates) == 1:
            figures = by_rate[self.rates[0]]
            found = figures["normalized_s"]
            return figures.get("normalized_s_low", found), figures.get("normalized_s_high", found)
        ends = []
        for end in ("normalized_s_low", "normalized_s_high"):
            bound = {rate: figures.get(end, figures["normalized_s"]) for rate, figures in by_rate.items()}
            curve = sorted(bound.items())
            ends.append(-(knee_of(curve, self.limit_s) or 0.0))
        return min(ends), max(ends)

    def is_better(self, one: Side, other: Side) -> bool:
        """Whether `one` ranks above `other` without overlapping intervals."""
        ranked = self.ranked()
        (_, end), (start, _) = self.span(one), self.span(other)
        is_measured = any("normalized_s_low" in figures for figures in self.sides[one].values())
        return ranked.index(one) < ranked.index(other) and (end < start or not is_measured)

    def places(self) -> list[tuple[int, Side]]:
        """Return the sides in order with their places; a place is one more than the number of better
        sides."""
        ranked = self.ranked()
        return [(1 + sum(self.is_better(other, side) for other in ranked), side) for side in ranked]

    def short_name(self, side: Side) -> str:
        """Return the policy and the other parts that differ, without the predictor."""
        differing = [at for at in (2, 3) if len({each[at] for each in self.sides}) > 1]
        return " ".join(label(side[at]) for at in (0, *differing))

    def ranked(self) -> list[Side]:
        """Return sides by knee, highest first, then by latency at the highest rate."""
        last = self.rates[-1]

        def key(side: Side) -> tuple[float, float]:
            latency_s = self.sides[side].get(last, {}).get("normalized_s", math.inf)
            return -(self.knee(side) or 0.0), latency_s

        return sorted(self.sides, key=key)


def reports(results: Results) -> list[TraceReport]:
    """Return a report per trace, by name, without cells that have no answers."""
    found = []
    for trace in sorted({cell.trace for cell, _ in results}):
        gathered: dict[Side, dict[float, list[Figures]]] = {}
        for cell, figures in results:
            if cell.trace == trace and "normalized_s" in figures:
                side = (cell.policy, cell.predictor, cell.placement, cell.eviction)
                gathered.setdefault(side, {}).setdefault(cell.rate, []).append(figures)
        sides = {
            side: {rate: _mean(several) for rate, several in by_rate.items()}
            for side, by_rate in gathered.items()
        }
        if sides:
            least_s = min(each["normalized_s"] for by_rate in sides.values() for each in by_rate.values())
            found.append(TraceReport(trace, sides, LIMIT * least_s))
    return found


def _mean(several: Sequence[Figures]) -> Figures:
    names = set.intersection(*(set(figures) for figures in several))
    means = {name: fmean(figures[name] for figures in several) for name in names}
    if len(several) >= LEAST_TURNS and "normalized_s_low" not in means:  # seeds of a simulation
        low, high = mean_interval([figures["normalized_s"] for figures in several])
        means |= {"normalized_s_low": low, "normalized_s_high": high}
    return means


def knee_of(curve: Sequence[tuple[float, float]], limit: float) -> float | None:
    """Return the x where a sorted curve first exceeds the limit, as `TraceReport.knee`."""
    before: tuple[float, float] | None = None
    for x, y in curve:
        if y > limit:
            if before is None:
                return None
            share = math.log(limit / before[1]) / math.log(y / before[1])
            return before[0] + share * (x - before[0])
        before = x, y
    return math.inf


def tables(results: Results) -> list[Table]:
    """Return a ranking per trace, and latency by rate if there are several; at most 80 columns wide."""
    made = []
    for report in reports(results):
        made.append(_ranking(report))
        if len(report.rates) > 1:
            made.append(_by_rate(report))
    return made


def _ranking(report: TraceReport) -> Table:
    at = _compared_rate(report)
    names = _names(report)
    has_knees = len(report.rates) > 1
    rows = []
    for place, side in report.places():
        figures = report.sides[side].get(at, {})
        knee = [_knee_text(report, side)] if has_knees else []
        rows.append((place, *(label(side[index]) for index in names.values()), *knee, *_compared(figures)))
    limit = f"within {report.limit_s:.3g} s a token ({LIMIT:g} × the least)"
    head = f"{_stem(report.trace)}: who goes furthest {limit}" if has_knees else _stem(report.trace)
    columns = ["#", *names, *(["to /s"] if has_knees else []), f"s/token at {at:g}/s", "TTFT s", "SLO"]
    return Table(head, [*columns, "failed"], rows)


def _compared(figures: Figures) -> tuple[str, ...]:
    shown = ("normalized_s", "ttft_s_p50", "slo", "failures")
    told = [f"{figures[name]:.3g}" if name in figures else "" for name in shown]
    if "normalized_s_high" in figures:
        told[0] += f" ±{figures['normalized_s_high'] - figures['normalized_s']:.2g}"
    return tuple(told)


def _by_rate(report: TraceReport) -> Table:
    names = _names(report)
    rates = _spread(report.rates)
    rows = []
    for side in report.ranked():
        by_rate = report.sides[side]
        cells = (f"{by_rate[rate]['normalized_s']:.3g}" if rate in by_rate else "" for rate in rates)
        rows.append((*(label(side[index]) for index in names.values()), *cells))
    return Table(f"{_stem(report.trace)}: s/token by requests/s", (*names, *(f"{r:g}" for r in rates)), rows)


def _names(report: TraceReport) -> dict[str, int]:
    """Return the parts of a side that differ, with their index."""
    parts = {"policy": 0, "predictor": 1, "placement": 2, "eviction": 3}
    return {
        name: index
        for name, index in parts.items()
        if not index or len({side[index] for side in report.sides}) > 1
    }


def _compared_rate(report: TraceReport) -> float:
    """Return the highest rate that the best side sustains, or the lowest rate."""
    furthest = report.knee(report.ranked()[0]) or 0.0
    return max((rate for rate in report.rates if rate <= furthest), default=report.rates[0])


def _spread(rates: Sequence[float]) -> list[float]:
    """Return at most `_MOST_RATES` rates, with the first and the last."""
    if len(rates) <= _MOST_RATES:
        return list(rates)
    step = (len(rates) - 1) / (_MOST_RATES - 1)
    return [rates[round(at * step)] for at in range(_MOST_RATES)]


def _knee_text(report: TraceReport, side: Side) -> str:
    knee = report.knee(side)
    if knee is None:
        return f"<{report.curve(side)[0][0]:g}"
    return f">{report.curve(side)[-1][0]:g}" if math.isinf(knee) else f"{knee:.3g}"


def _stem(trace: str) -> str:
    return Path(trace).stem


def closing(results: Results) -> str:
    """Return the result in one sentence; empty if nothing was answered."""
    made = reports(results)
    if not made:
        return ""
    said = "; ".join(_outcome_of(report) for report in made)
    return said[0].upper() + said[1:] + "."


def _outcome_of(report: TraceReport) -> str:
    first = report.ranked()[0]
    others = [side for side in report.ranked()[1:] if _is_told(report, first, side)]
    worse = [side for side in others if report.is_better(first, side)]
    alike = [side for side in others if side not in worse]
    where, unclear = f"on {_stem(report.trace)}", ""
    if alike:
        unclear = f"; the intervals of {_listed(_called(report, side) for side in alike)} overlap with it"
    if len(report.rates) == 1:
        latency_s = report.sides[first][report.rates[0]]["normalized_s"]
        verb = "is fastest with" if worse or not others else "takes"
        took = f"{verb} {latency_s:.3g} s a token"
        return f"{where} {_called(report, first)} {took}{_than(report, worse)}{unclear}"
    knee = report.knee(first)
    if knee is None:
        return f"{where} the lowest rate was too much for every policy: try lower ones"
    if math.isinf(knee):
        name = report.short_name(first)
        return f"{where} the highest rate, {report.rates[-1]:g}/s, was not too much for {name}: try more"
    verb = "goes furthest, to" if worse or not others else "goes to"
    further = _times(report, knee, worse)
    return f"{where} {_called(report, first)} {verb} {knee:.3g} requests/s{further}{unclear}"


def _is_told(report: TraceReport, first: Side, side: Side) -> bool:
    """Whether the side is the best of its policy, placement and eviction order, other than the first
    one's."""
    name = report.short_name(side)
    best = next(other for other in report.ranked() if report.short_name(other) == name)
    return side == best and name != report.short_name(first)


def _called(report: TraceReport, side: Side) -> str:
    """Return the side's name, with its predictor if there are several."""
    name = report.short_name(side)
    return f"{name} with {label(side[1])}" if "predictor" in _names(report) else name


def _than(report: TraceReport, rest: Sequence[Side]) -> str:
    if not rest:
        return ""
    rate = report.rates[0]
    return ", before " + _listed(
        f"{report.short_name(side)} ({report.sides[side][rate]['normalized_s']:.3g})" for side in rest
    )


def _times(report: TraceReport, knee: float, rest: Sequence[Side]) -> str:
    """Return how much further the knee is than that of each other policy."""
    said = []
    for side in rest:
        other, name = report.knee(side), report.short_name(side)
        said.append(f"{name} (below the lowest)" if other is None else f"{knee / other:.2f} × {name}")
    return f", {_listed(said)}" if said else ""


def _listed(words: Iterable[str]) -> str:
    several = list(words)
    return several[0] if len(several) == 1 else f"{', '.join(several[:-1])} and {several[-1]}"
