"""What a bench hands back, and the JSON document made of it. Knows no bench."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.kit.provenance import git_state, machine, versions


@dataclass(frozen=True)
class Table:
    """Rows for a person to read. Cells are printed as they are, floats with four digits."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True)
class Outcome:
    """Of one run."""

    figures: Mapping[str, float]
    """Flat: name → number. What could not be measured is left out, not set to 0 or NaN."""
    failures: int
    """Requests, steps or checks that failed; printed beside every latency."""
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    """Sentences that a reader of the figures has to know."""
    simulated: bool = False
    """Figures of the simulator: the table says so."""
    headline: Sequence[str] = ()
    """Which figures `python -m bench record` shows; none: all."""
    closing: str = ""
    """One sentence that says what came out; printed last."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the JSON document, for what is no single number."""

    def __post_init__(self) -> None:
        wrong = [name for name, value in self.figures.items() if not math.isfinite(value)]
        if wrong:
            raise ValueError(f"figures that are no finite numbers: {', '.join(sorted(wrong))}")


def document(name: str, config: Mapping[str, Any], outcome: Outcome) -> dict[str, Any]:
    """The JSON of one run: `name, git, versions, machine, config, figures, failures` and a bench's extras."""
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
    """With paths and the like as text; a NaN is an error."""
    return json.dumps(made, indent=2, default=str, allow_nan=False) + "\n"


def joined(parts: Sequence[Outcome]) -> Outcome:
    """In order. Raises IndexError for none."""
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
