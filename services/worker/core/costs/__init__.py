"""Cost models by name: numbers fitted to measurements of real engines, as code with their source."""

from services.worker.core.costs.fitted import (
    LLAMA2_13B_2_A100,
    OPT_13B_A100,
    OPT_13B_A100_TP2,
    OPT_66B_A100_TP4,
    FittedCost,
)
from services.worker.core.costs.kernels import KERNEL_COSTS
from shared.errors import ConfigError

_FITTED = (OPT_13B_A100, OPT_13B_A100_TP2, OPT_66B_A100_TP4, LLAMA2_13B_2_A100)
COSTS: dict[str, FittedCost] = {cost.name: cost for cost in (*_FITTED, *KERNEL_COSTS)}


def find_cost(name: str) -> FittedCost:
    """The cost model called `name`. Raises ConfigError listing the names that exist."""
    if name not in COSTS:
        raise ConfigError(f"no cost model {name!r}; there are {', '.join(sorted(COSTS))}", param="cost")
    return COSTS[name]
