"""Settings of placement."""

from pydantic import Field

from services.placement.core.move_mode import ModeChoice
from services.placement.core.order import find_order
from services.placement.core.packer import PackingRules
from services.placement.core.roles import BOTH, read_roles
from services.placement.core.scaling import ScalingRules
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
    reservation_s: float = Field(
        default=5.0, gt=0, description="how long a placed sequence counts before it is seen"
    )
    epoch_s: float = Field(
        default=0.5, gt=0, description="mell and its like: growths, ends and moves are settled so often"
    )
    packing_share: float = Field(
        default=0.85, gt=0, le=1, description="mell and its like: of a worker's blocks that are packed"
    )
    packing_sequences: int = Field(
        default=64, ge=1, description="mell and its like: sequences that one worker takes at most"
    )
    requests_weight: float = Field(
        default=0.01, ge=0, description="mell: against a target of a move, by request on it"
    )
    free_weight: float = Field(default=1.0, ge=0, description="mell: for a target, by its share free")
    distance_weight: float = Field(
        default=0.05, ge=0, description="mell: against a target that is on another host"
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
    spare_workers: int = Field(default=0, ge=0, description="of each model idle ones that are not stopped")
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

    def packing(self) -> PackingRules:
        """Return the settings of `packer`."""
        return PackingRules(
            share=self.packing_share, most_sequences=self.packing_sequences, patience_s=self.reservation_s
        )

    def scaling(self) -> ScalingRules:
        """Return the settings of `scaling`."""
        return ScalingRules(
            least=self.min_workers,
            most=self.max_workers,
            spare=self.spare_workers,
            linger_s=self.idle_s,
        )
