"""What a step costs: the seam between the simulated worker and whatever was fitted to real ones."""

from collections.abc import Sequence
from typing import Protocol


class CostModel(Protocol):
    """Seconds that one iteration takes. Deterministic."""

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> str:
        """Where its numbers come from."""
        ...

    def step_s(self, chunks: Sequence[tuple[int, int]], decodes: int, context_tokens: int) -> float:
        """One step that prefills the token ranges `chunks` ([first, end) each) and decodes `decodes`
        sequences.

        `context_tokens` is the sum of the decodes' contexts, the tokens being computed included. With
        nothing to do it is 0.
        """
        ...


def split_singles(parts: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], int, int]:
    """Of token ranges [first, end) that one step computes: `chunks`, `decodes` and `context_tokens` of
    `step_s`. One token costs what a decode does, be it the last of a prompt."""
    chunks = [part for part in parts if part[1] - part[0] > 1]
    contexts = [end for first, end in parts if end - first == 1]
    return chunks, len(contexts), sum(contexts)
