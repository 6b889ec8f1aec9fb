"""Comparison of all sides on a trace: the peer's reference, sustained rates, and figures past the peer's
knee.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from bench.simulated.ecoserve.measures import (
    KneeQuestion,
    RateQuestion,
    Reference,
    answer_knee,
    answer_rate,
    measure_reference,
)
from bench.simulated.ecoserve.sides import PolicySide, case_of
from sim.case import Case, Machine
from sim.knee import TOLERANCE
from sim.sweep import sweep
from sim.workloads import Source

PAST_KNEE = 1.2
"""Multiple of the peer's sustained rate at which SLO attainment is compared."""
PEER = "vllm"
CURVE = (0.4, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0, 2.5)
"""Rates of a picture, as multiples of the peer's sustained rate."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Size of the runs: `duration_s` of arrivals at the peer's capacity, and at least `requests`."""

    requests: int
    duration_s: float
    seeds: tuple[int, ...]
    processes: int | None = None
    tolerance: float = TOLERANCE
    """Tolerance of sustained rates."""


@dataclass(slots=True)
class Comparison:
    """Results of one trace, by the sides' labels. Rates in requests per second."""

    source: Source
    reference: Reference
    knees: dict[str, float]
    requests: int
    """Requests of each run."""
    stable: dict[str, float] = field(default_factory=dict)
    """Like `knees`, with the queue drained soon after the last arrival."""
    past_knee: dict[str, dict[str, float]] = field(default_factory=dict)
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    @property
    def peer(self) -> str:
        """Label of the better of the peer's two settings."""
        return max((label for label in self.knees if label.startswith(PEER)), key=lambda one: self.knees[one])

    def rate_ratio(self, label: str, rival: str) -> float | None:
        """Return the ratio of sustained rates; None if either is missing or zero."""
        return self._ratio(self.knees, label, rival)

    def stable_ratio(self, label: str, rival: str) -> float | None:
        """Return the ratio of stable rates."""
        return self._ratio(self.stable, label, rival)

    def _ratio(self, rates: dict[str, float], label: str, rival: str) -> float | None:
        rival = self.peer if rival == PEER else rival
        return rates[label] / rates[rival] if rates.get(label) and rates.get(rival) else None

    def slo_ratio(self, label: str) -> float | None:
        """Return the ratio of SLO attainment to the peer's at 1.2 times its knee; None if that is 0."""
        peer = self.past_knee[self.peer]["slo"]
        return self.past_knee[label]["slo"] / peer if label in self.past_knee and peer else None


Tell = Callable[[str], None]


def compare(
    sources: Sequence[Source], sides: Sequence[PolicySide], machine: Machine, effort: Effort, tell: Tell
) -> list[Comparison]:
    """Run every side on every trace; `tell` is called for each measurement. Labels must be unique."""
    peer = next(side for side in sides if side.label == PEER)
    first = [_case(peer, source, machine, effort, effort.requests) for source in sources]
    rough = sweep(measure_reference, first, processes=effort.processes)
    counts = [max(effort.requests, round(effort.duration_s * one.capacity_per_s)) for one in rough]
    again = [replace(case, requests=count) for case, count in zip(first, counts, strict=True)]
    references = sweep(measure_reference, again, processes=effort.processes)
    found = [
        Comparison(source, reference, {}, count)
        for source, reference, count in zip(sources, references, counts, strict=True)
    ]
    for one in found:
        one.knees = dict.fromkeys((side.label for side in sides), 0.0)
        one.stable = dict(one.knees)
    _find_knees(found, sides, machine, effort, tell)
    _look_past_knees(found, sides, machine, effort, tell)
    return found


def _case(side: PolicySide, source: Source, machine: Machine, effort: Effort, requests: int) -> Case:
    return case_of(side, source, machine, requests=requests, seed=effort.seeds[0])


def _find_knees(
    found: Sequence[Comparison], sides: Sequence[PolicySide], machine: Machine, effort: Effort, tell: Tell
) -> None:
    asked = [(one, side, is_stable) for one in found for side in sides for is_stable in (False, True)]
    questions = [
        KneeQuestion(
            side.label,
            _case(side, one.source, machine, effort, one.requests),
            one.reference.limit_s,
            one.reference.capacity_per_s,
            effort.seeds,
            one.reference.longest_s if is_stable else math.inf,
            effort.tolerance,
        )
        for one, side, is_stable in asked
    ]
    knees = sweep(
        answer_knee, questions, processes=effort.processes, on_result=lambda done, _: tell(done.label)
    )
    for (one, side, is_stable), knee in zip(asked, knees, strict=True):
        (one.stable if is_stable else one.knees)[side.label] = knee


def _look_past_knees(
    found: Sequence[Comparison], sides: Sequence[PolicySide], machine: Machine, effort: Effort, tell: Tell
) -> None:
    asked = [(one, side) for one in found for side in sides]
    questions = [
        RateQuestion(
            side.label,
            _case(side, one.source, machine, effort, one.requests),
            PAST_KNEE * one.knees[one.peer],
            one.reference.level,
            effort.seeds,
        )
        for one, side in asked
    ]
    answers = sweep(
        answer_rate, questions, processes=effort.processes, on_result=lambda done, _: tell(done.label)
    )
    for (one, side), answer in zip(asked, answers, strict=True):
        one.past_knee[side.label] = answer


def add_curves(
    found: Sequence[Comparison], sides: Sequence[PolicySide], machine: Machine, effort: Effort, tell: Tell
) -> None:
    """Add the normalized latency at the rates of `CURVE`, for pictures."""
    asked = [(one, side, factor * one.knees[one.peer]) for one in found for side in sides for factor in CURVE]
    questions = [
        RateQuestion(
            side.label,
            _case(side, one.source, machine, effort, one.requests),
            rate,
            one.reference.level,
            effort.seeds[:1],
        )
        for one, side, rate in asked
    ]
    answers = sweep(
        answer_rate, questions, processes=effort.processes, on_result=lambda done, _: tell(done.label)
    )
    for (one, side, rate), answer in zip(asked, answers, strict=True):
        one.curves.setdefault(side.label, []).append((rate, answer["normalized_s"]))
