"""Cost models by name: what a step costs, fitted to measurements of real engines."""

from collections.abc import Sequence
from typing import Protocol

from services.worker.core.costs.fitted import FITTED, FittedCost
from shared.errors import ConfigError

COSTS: dict[str, FittedCost] = {cost.name: cost for cost in FITTED}


class CostModel(Protocol):
    """Seconds that one iteration takes. Deterministic."""

    @property
    def name(self) -> str: ...

    def step_s(self, chunks: Sequence[tuple[int, int]], decodes: int, context_tokens: int) -> float:
        """Seconds of a step that prefills token ranges `chunks` [first, end) and decodes `decodes` sequences.
        `context_tokens` is the sum of the decodes' contexts, the tokens being computed included. With nothing
        to do it is 0."""
        ...


def split_singles(parts: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], int, int]:
    """Split token ranges [first, end) of a step into `chunks`, `decodes` and `context_tokens` of `step_s`.
    One token costs what a decode does, even the last of a prompt."""
    chunks = [part for part in parts if part[1] - part[0] > 1]
    contexts = [end for first, end in parts if end - first == 1]
    return chunks, len(contexts), sum(contexts)


def find_cost(name: str) -> FittedCost:
    """The cost model called `name`. Raises ConfigError listing the names that exist."""
    if name not in COSTS:
        raise ConfigError(f"no cost model {name!r}; there are {', '.join(sorted(COSTS))}", param="cost")
    return COSTS[name]
