"""Prompts and cells of the engine bench. Knows no server."""

import random
from dataclasses import dataclass
from typing import Any

_SPREAD = 0.1
"""Prompts are this much shorter or longer than the nominal context, evenly: no two sequences in step."""
_FEWEST_SEQUENCES = 8
"""A cell of fewer sequences is repeated until so many have run: one short answer alone is noise."""


@dataclass(frozen=True)
class BatchCell:
    """One workload: `batch` requests at once, each with about `context` prompt tokens."""

    context: int
    batch: int
    output_tokens: int

    @property
    def rounds(self) -> int:
        """How often the batch is run, one after the other."""
        return max(1, min(4, _FEWEST_SEQUENCES // self.batch))

    @property
    def tokens(self) -> int:
        """Output tokens of the whole cell."""
        return self.rounds * self.batch * self.output_tokens

    @property
    def name(self) -> str:
        return f"b{self.batch}_ctx{self.context}"


def cells(contexts: list[int], batches: list[int], output_tokens: int) -> list[BatchCell]:
    """Smallest first."""
    return [
        BatchCell(context, batch, output_tokens) for context in sorted(contexts) for batch in sorted(batches)
    ]


def bodies(cell: BatchCell, vocabulary: int, draw: random.Random) -> list[list[dict[str, Any]]]:
    """Request bodies, by round. Token ids are drawn anew for each: no prompt shares a prefix with another."""
    return [[_body(cell, vocabulary, draw) for _ in range(cell.batch)] for _ in range(cell.rounds)]


def _body(cell: BatchCell, vocabulary: int, draw: random.Random) -> dict[str, Any]:
    length = max(1, round(cell.context * draw.uniform(1 - _SPREAD, 1 + _SPREAD)))
    return {
        "prompt": [draw.randrange(min(16, vocabulary // 2), vocabulary) for _ in range(length)],
        "max_tokens": cell.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
