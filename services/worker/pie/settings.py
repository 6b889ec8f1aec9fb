"""Settings of Pie in one worker (`worker.pie`)."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class PieSettings(BaseModel):
    """Layers' KV swapped to host memory behind the computation. Rates in bytes per second."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool | Literal["auto"] = Field(
        default="auto",
        description="swap KV to the host; `auto`: where blocks can be swapped, for a sequence that is too "
        "long for the device alone, and where more rows at once pay; true: as far as steps do not wait",
    )
    form: Literal["blocks", "layers"] = Field(
        default="blocks",
        description="what lies on the host: some blocks of all layers, beside a prefix cache and loans, or "
        "all blocks of some layers, without them; layers on a GPU, and where there is no native library",
    )
    expansion: Literal["auto", "fixed"] = Field(
        default="auto", description="how many layers are swapped: found while running, or `fifo_layers`"
    )
    fifo_layers: int = Field(
        default=0, ge=0, description="layers in the swap queue at the start: 0, or 3 and more"
    )
    host_mb: int = Field(
        default=1024,
        ge=1,
        description="host memory for layers at most, in MiB; with room for all, not the swapped ones alone, "
        "only what was written goes out again",
    )
    bandwidth_limit: float = Field(
        default=0.0, ge=0, description="bytes per second of the link, in each direction; 0: as fast as memory"
    )
    background_traffic: float = Field(
        default=0.0, ge=0, description="bytes per second that others send over the link, for experiments"
    )
    overlap: bool = Field(
        default=True,
        description="copy behind the computation; false, for experiments: in its way (layers, on a CPU only)",
    )
    window_iterations: int = Field(
        default=32, ge=4, description="iterations between two looks at the expansion"
    )
    notice_s: float = Field(
        default=0.5, ge=0, description="from the report that blocks will go to their going: two heartbeats"
    )
    wait_timeout_s: float = Field(
        default=30.0, gt=0, description="a layer that takes longer to arrive is an error"
    )
