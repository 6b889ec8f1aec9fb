"""EcoServe's figure 12: padding, reserve, buffer and SLO scale varied one at a time from the paper's
settings.

Measured just past the peer's knee, where requests queue and memory is short; elsewhere nothing is sensitive.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from bench.simulated.ecoserve import sides
from bench.simulated.ecoserve.comparison import PAST_KNEE, Comparison, Effort
from bench.simulated.ecoserve.measures import RateQuestion, answer_rate
from bench.simulated.ecoserve.sides import PolicySide, case_of
from sim.case import Machine
from sim.sweep import sweep

VALUES: dict[str, tuple[float, ...]] = {
    "pad": (0.0, 0.05, 0.10, 0.15, 0.20, 0.30, 0.50),
    "reserve_ratio": (0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.08),
    "buffer": (0.0, 0.05, 0.10, 0.15, 0.20, 0.30),
    "slo_scale": (0.5, 1.0, 1.5, 2.0, 2.5),
}
SHOWN = {"JCT": "jct_s", "throughput": "tokens_per_s", "SLO": "slo"}

Curves = dict[str, dict[str, list[tuple[float, float]]]]
"""Maps figure and trace to (value, measured) pairs."""


def _question(
    one: Comparison, side: PolicySide, machine: Machine, effort: Effort, name: str, value: float
) -> RateQuestion:
    case = case_of(side, one.source, machine, requests=one.requests, seed=effort.seeds[0])
    options: dict[str, Any] = {**dict(case.options), name: value}
    level = replace(one.reference.level, scale=value) if name == "slo_scale" else one.reference.level
    case = replace(case, options=tuple(sorted(options.items())))
    return RateQuestion(f"{name} {value:g}", case, PAST_KNEE * one.knees[one.peer], level, effort.seeds)


def measure_sensitivities(
    found: Sequence[Comparison],
    side: PolicySide,
    machine: Machine,
    effort: Effort,
    tell: Callable[[str], None],
) -> dict[str, Curves]:
    """Return the curves by parameter, with one run per value, trace and seed."""
    questions = [
        _question(one, side, machine, effort, name, value)
        for name, values in VALUES.items()
        for one in found
        for value in values
    ]
    answers = iter(
        sweep(answer_rate, questions, processes=effort.processes, on_result=lambda done, _: tell(done.label))
    )
    results: dict[str, Curves] = {}
    for name, values in VALUES.items():
        curves: Curves = {shown: {} for shown in SHOWN}
        for one in found:
            measured = [(value, next(answers)) for value in values]
            for shown, key in SHOWN.items():
                curves[shown][one.source.name] = [(value, answer[key]) for value, answer in measured]
        results[name] = curves
    return results


def best_rows(results: dict[str, Curves]) -> list[tuple[str, str, float, float, str]]:
    """Return rows of parameter, trace, value with the least JCT, relative cost of the worst value, and
    paper's best.
    """
    rows = []
    for name, curves in results.items():
        for trace, curve in curves["JCT"].items():
            value, least_s = min(curve, key=lambda point: point[1])
            worst_s = max(jct_s for _, jct_s in curve)
            printed = sides.BEST.get(name, {}).get(trace)
            rows.append(
                (name, trace, value, worst_s / least_s - 1, "" if printed is None else f"{printed:g}")
            )
    return rows
