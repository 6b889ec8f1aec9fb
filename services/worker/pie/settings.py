"""Settings of Pie in one worker (`worker.pie`)."""

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field


class PieSettings(BaseModel):
    """Some blocks of all layers in host memory, brought in behind the computation. Rates in bytes per
    second."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    MOVED: ClassVar = {
        "host_mb": "worker.host_memory.mb; Pie has what .cache_share and .lent_share leave of it"
    }

    enabled: bool | Literal["auto"] = Field(
        default="auto",
        description="swap KV to the host; auto: for a sequence too long for the device, and where more rows "
        "pay; true: as far as steps do not wait",
    )
    expansion: Literal["auto", "fixed"] = Field(
        default="auto", description="the level: found while running, or `fifo_layers`"
    )
    fifo_layers: int = Field(
        default=0,
        ge=0,
        description="level at the start, as the length of a queue of layers: 0, or 3 and more",
    )
    bandwidth_limit: float = Field(
        default=0.0, ge=0, description="of the link in each direction, on a CPU; 0: as fast as memory"
    )
    background_traffic: float = Field(
        default=0.0, ge=0, description="what others send over the link, for experiments"
    )
    window_iterations: int = Field(default=32, ge=4, description="iterations between two looks at the level")
    notice_s: float = Field(
        default=0.5, ge=0, description="from the report that blocks will go to their going: two heartbeats"
    )
