"""Settings of what a worker fetches from others."""

from pydantic import BaseModel, ConfigDict, Field


class TransferConfig(BaseModel):
    """Section `worker.transfer`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = Field(default=True, description="fetch and give blocks for sequences that move")
    batch_blocks: int = Field(default=64, ge=1, le=256, description="fetched with one question")
    answer_s: float = Field(default=5.0, gt=0, description="another worker answers within so long")
    shadow_link_share: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="of the time, that in which copies of other workers' running sequences are fetched",
    )
    link_bytes_per_s: float = Field(
        default=0.0, ge=0, description="fetch no faster than that; 0: as fast as the link is"
    )
