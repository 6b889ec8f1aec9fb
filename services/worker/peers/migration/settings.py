"""Settings of migration."""

from pydantic import BaseModel, ConfigDict, Field


class TransferConfig(BaseModel):
    """Section `worker.transfer`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = Field(default=True, description="fetch and give blocks for sequences that move")
    batch_blocks: int = Field(default=64, ge=1, le=256, description="blocks fetched by one request")
    answer_s: float = Field(default=5.0, gt=0, description="time limit for another worker's answer")
    shadow_link_share: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="share of time in which copies of other workers' running sequences may be fetched",
    )
    link_bytes_per_s: float = Field(default=0.0, ge=0, description="limit on the speed of fetches; 0: none")
