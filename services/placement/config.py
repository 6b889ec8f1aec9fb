"""Placement's settings."""

from pydantic import Field

from shared.config import ServiceConfig


class PlacementConfig(ServiceConfig):
    """Section `placement`."""

    policy: str = Field(
        default="prefix_aware",
        description="best_fit, worst_fit, prefix_aware, or a name an installed package registers",
    )
    order: str = Field(
        default="fcfs", description="of waiting prompts: fcfs, fpf (nearest cached prefix first), relaxed_fpf"
    )
    worker_timeout_s: float = Field(default=2.0, gt=0, description="A worker silent for longer gets nothing")
    reservation_s: float = Field(
        default=5.0, gt=0, description="How long a placed sequence counts before it is seen"
    )
