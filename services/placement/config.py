"""Settings of placement."""

from pydantic import Field

from services.placement.core.move_mode import ModeChoice
from services.placement.core.orders import find_order
from services.placement.core.roles import BOTH, read_roles
from services.placement.policy import LIVE_PACKINGS, create
from shared.config import ServiceConfig
from shared.errors import ConfigError


class PlacementConfig(ServiceConfig):
    """Section `placement`."""

    policy: str = Field(
        default="prefix_aware",
        description="best_fit, worst_fit, prefix_aware, a name that an installed package declares, or"
        " FILE.py:CLASS; by migration: mell, mell_eager, load_balance",
    )
    roles: str | list[str] = Field(
        default=BOTH,
        description="of workers: both (each computes prompts and writes answers), adaptive (prompts and"
        " answers on workers of their own where that is faster), or a list, as prefill,prefill,decode: so"
        " many workers of each, in the order in which they are heard of; the others do both",
    )
    order: str = Field(
        default="policy",
        description="of waiting prompts: policy (as the scheduler ranks them), fcfs, fpf (nearest cached"
        " prefix first), relaxed_fpf",
    )
    worker_timeout_s: float = Field(default=2.0, gt=0, description="a worker silent for longer gets nothing")
    epoch_s: float = Field(
        default=0.5, gt=0, description="mell and its like: growths, ends and moves are settled so often"
    )
    move_mode: ModeChoice = Field(
        default="adaptive",
        description="what travels: kv, tokens, or per move what is cheaper by what workers measured",
    )
    scale: bool = Field(
        default=False, description="mell and its like: have workers stopped that serve nothing, and started"
    )
    min_workers: int = Field(default=1, ge=1, description="of each model that run in any case")
    max_workers: int = Field(
        default=0, ge=0, description="of each model that run at most; 0: as many as there are"
    )
    idle_s: float = Field(default=30.0, ge=0, description="a worker that served nothing so long is stopped")

    def check(self) -> None:
        find_order(self.order)
        fixed = read_roles(self.roles)
        if self.policy in LIVE_PACKINGS and fixed != ():
            raise ConfigError(
                f"roles are for policies that choose a worker for each prompt; {self.policy} moves answers by"
                f" itself: write placement.roles={BOTH}, or another placement.policy",
                param="roles",
            )
        if self.policy not in LIVE_PACKINGS:
            create(self.policy)
