"""Cost models by name: numbers fitted to measurements of real engines, as code with their source."""

from services.worker.core.costs.base import CostModel
from services.worker.core.costs.fitted import OPT_13B_A100, OPT_13B_A100_TP2, OPT_66B_A100_TP4
from services.worker.core.costs.kernels import KERNEL_COSTS
from shared.errors import ConfigError

COSTS: dict[str, CostModel] = {
    cost.name: cost for cost in (OPT_13B_A100, OPT_13B_A100_TP2, OPT_66B_A100_TP4, *KERNEL_COSTS)
}


def find_cost(name: str) -> CostModel:
    """The cost model called `name`. Raises ConfigError listing the names that exist."""
    if name not in COSTS:
        raise ConfigError(f"no cost model {name!r}; there are {', '.join(sorted(COSTS))}", param="cost")
    return COSTS[name]
