"""Settings of a worker's prefix cache."""

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.worker.kv.core.eviction import ORDERS


class PrefixCacheConfig(BaseModel):
    """Section `worker.prefix_cache`. The first tier is the worker's own KV; sizes here are of those below."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = Field(default=True, description="keep the KV of finished sequences for later ones")
    eviction: str = Field(
        default="frequent",
        description=f"eviction order: {', '.join(ORDERS)}, an installed one, or FILE.py:CLASS",
    )
    host_mb: int = Field(default=256, ge=0, description="host memory for evicted blocks, in MiB")
    host_blocks: int = Field(default=0, ge=0, description="the same in blocks; 0: use host_mb")
    swap_share: float = Field(
        default=0.5, ge=0, le=1, description="share of the host tier for preempted sequences; 0: none"
    )
    shadow_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="share of the host tier for copies of other workers' running sequences; 0: none",
    )
    peer_mb: int = Field(
        default=0, ge=0, description="most host memory to borrow from other workers, in MiB; 0: none"
    )
    peer_blocks: int = Field(default=0, ge=0, description="the same in blocks; 0: use peer_mb")
    disk_mb: int = Field(default=0, ge=0, description="file for blocks that outlive the worker, in MiB")
    disk_path: str = Field(default="", description="folder of that file; each worker has its own in it")
    flush_s: float = Field(
        default=2.0, ge=0, description="longest flush from memory to disk at a clean stop; 0: none"
    )
    lookahead_sequences: int = Field(
        default=64, ge=0, description="sequences about to start whose blocks are read ahead from disk"
    )
    audit_rate: float = Field(
        default=0.0, ge=0, le=1, description="share of device hits to recompute and compare"
    )
    host_bytes_per_s: float = Field(default=0.0, ge=0, description="for tests: a slow host; 0: full speed")
    disk_bytes_per_s: float = Field(default=0.0, ge=0, description="for tests: a slow disk; 0: full speed")

    def host_slots(self, block_bytes: int) -> int:
        """Return the number of blocks on the host; 0: nothing is cached."""
        return (self.host_blocks or (self.host_mb << 20) // block_bytes) if self.enabled else 0

    def peer_slots(self, block_bytes: int) -> int:
        """Return the number of blocks in other workers' host memory; 0: nothing is cached."""
        return (self.peer_blocks or (self.peer_mb << 20) // block_bytes) if self.enabled else 0

    @model_validator(mode="after")
    def _each_tier_has_what_it_needs(self) -> "PrefixCacheConfig":
        if self.disk_mb and not self.disk_path:
            raise ValueError("disk_mb needs disk_path, a folder that outlives the worker")
        if self.disk_mb and not (self.host_mb or self.host_blocks):
            raise ValueError("disk_mb needs host_mb: blocks go down one tier at a time")
        if (self.peer_mb or self.peer_blocks) and not (self.host_mb or self.host_blocks):
            raise ValueError("peer_mb needs host_mb: blocks go down one tier at a time")
        return self
