"""Several outcomes as one. Each table says for itself what is simulated."""

from collections.abc import Sequence
from dataclasses import replace

from bench.outcome import Outcome


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
