"""EcoServe's figure 12: padding, reserve, buffer and SLO scale varied one at a time from the paper's
settings.
"""

from dataclasses import replace
from typing import Any

from bench.simulated.ecoserve.measures import RateQuestion, answer_rate
from sim.sweep import sweep

VALUES: dict[str, tuple[float, ...]] = {
    "pad": (0.0, 0.05, 0.10, 0.15, 0.20, 0.30, 0.50),
    "reserve_ratio": (0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.08),
    "buffer": (0.0, 0.05, 0.10, 0.15, 0.20, 0.30),
    "slo_scale": (0.5, 1.0, 1.5, 2.0, 2.5),
}


def measure_sensitivities(base: RateQuestion) -> dict[str, dict[float, dict[str, float]]]:
    """Return `sim.summary` by parameter and value, each with the base's other settings."""
    asked = [(name, value) for name, values in VALUES.items() for value in values]
    found: dict[str, dict[float, dict[str, float]]] = {name: {} for name in VALUES}
    answers = sweep(answer_rate, [_question(base, name, value) for name, value in asked])
    for (name, value), answer in zip(asked, answers, strict=True):
        found[name][value] = answer
    return found


def _question(base: RateQuestion, name: str, value: float) -> RateQuestion:
    options: dict[str, Any] = {**dict(base.case.options), name: value}
    level = replace(base.level, scale=value) if name == "slo_scale" else base.level
    return replace(base, case=replace(base.case, options=tuple(sorted(options.items()))), level=level)
