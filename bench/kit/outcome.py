"""The outcome of a bench, and its JSON document."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.kit.provenance import git_state, machine, versions


@dataclass(frozen=True)
class Table:
    """A table for people. Cells are printed as they are, floats with four digits."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True)
class Outcome:
    """Outcome of one run."""

    figures: Mapping[str, float]
    """Numbers by name. A figure that could not be measured is left out, not set to 0 or NaN."""
    failures: int
    """Failed requests, steps or checks; printed beside every latency."""
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    """Sentences needed to interpret the figures."""
    simulated: bool = False
    """Whether the figures come from the simulator; the table says so."""
    headline: Sequence[str] = ()
    """Figures that `python -m bench record` shows; empty for all."""
    closing: str = ""
    """One sentence that states the result; printed last."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the JSON document, for values that are not single numbers."""

    def __post_init__(self) -> None:
        wrong = [name for name, value in self.figures.items() if not math.isfinite(value)]
        if wrong:
            raise ValueError(f"figures that are no finite numbers: {', '.join(sorted(wrong))}")


def document(name: str, config: Mapping[str, Any], outcome: Outcome) -> dict[str, Any]:
    """Return the JSON of one run: `name, git, versions, machine, config, figures, failures` and extras."""
    return {
        "name": name,
        "git": git_state(),
        "versions": versions(),
        "machine": machine(),
        "config": dict(config),
        "figures": {key: float(value) for key, value in outcome.figures.items()},
        "failures": outcome.failures,
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "headline": list(outcome.headline),
        "simulated": outcome.simulated,
        "notes": list(outcome.notes),
        "closing": outcome.closing,
        **outcome.extra,
    }


def as_json(made: Mapping[str, Any]) -> str:
    """Return JSON, with paths as text. Raises ValueError for NaN."""
    return json.dumps(made, indent=2, default=str, allow_nan=False) + "\n"


def joined(parts: Sequence[Outcome]) -> Outcome:
    """Join outcomes in order. Raises IndexError if there are none."""
    whole = parts[0]
    for part in parts[1:]:
        whole = replace(
            whole,
            figures={**whole.figures, **part.figures},
            failures=whole.failures + part.failures,
            tables=[*whole.tables, *part.tables],
            notes=[*whole.notes, *part.notes],
            headline=[*whole.headline, *part.headline],
            simulated=whole.simulated and part.simulated,
        )
    return whole
