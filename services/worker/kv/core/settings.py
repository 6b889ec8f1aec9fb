"""Settings of a worker's prefix cache."""

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.worker.kv.core.eviction import ORDERS


class PrefixCacheConfig(BaseModel):
    """Section `worker.prefix_cache`. The first tier is the worker's own KV; sizes here are of those below."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = Field(default=True, description="keep the KV of finished sequences for those that follow")
    eviction: str = Field(
        default="frequent",
        description=f"which block goes first when a tier is full: {', '.join(ORDERS)}, the name of an "
        "installed order, or FILE.py:CLASS",
    )
    seed: int = Field(default=0, description="of the order `random`")
    host_mb: int = Field(default=256, ge=0, description="memory for blocks that left the device, in MiB")
    host_blocks: int = Field(default=0, ge=0, description="the same in blocks instead; 0: host_mb counts")
    swap_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="of the host's blocks, those that sequences taken off the device may have kept; 0: none",
    )
    shadow_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="of the host's blocks, those that copies of other workers' running sequences may take, "
        "should those workers die; what else needs room there goes before them; 0: none",
    )
    peer_mb: int = Field(
        default=0,
        ge=0,
        description="host memory that other workers lend, for blocks that leave the own: so much at most, in "
        "MiB; 0: none",
    )
    peer_blocks: int = Field(default=0, ge=0, description="the same in blocks instead; 0: peer_mb counts")
    disk_mb: int = Field(default=0, ge=0, description="file for blocks that outlive the worker, in MiB")
    disk_path: str = Field(default="", description="folder of that file; each worker has its own in it")
    flush_s: float = Field(
        default=2.0,
        ge=0,
        description="at a clean stop, so long for writing to disk what is only in memory; 0: nothing",
    )
    lookahead_sequences: int = Field(
        default=64,
        ge=0,
        description="of sequences that start soon, those whose blocks are read ahead from disk",
    )
    audit_rate: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="of hits on the device, those that are computed all the same and compared with what is "
        "stored",
    )
    host_bytes_per_s: float = Field(
        default=0.0, ge=0, description="for tests: make the host tier so slow; 0: as fast as it is"
    )
    disk_bytes_per_s: float = Field(
        default=0.0, ge=0, description="for tests: make the disk tier so slow; 0: as fast as it is"
    )
    peer_bytes_per_s: float = Field(
        default=0.0, ge=0, description="for tests: make peers so slow; 0: as fast as the links are"
    )

    def host_slots(self, block_bytes: int) -> int:
        """Blocks of so many bytes on the host; 0 where nothing is kept."""
        return (self.host_blocks or (self.host_mb << 20) // block_bytes) if self.enabled else 0

    def peer_slots(self, block_bytes: int) -> int:
        """Blocks of so many bytes in other workers' host memory; 0 where nothing is kept."""
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
