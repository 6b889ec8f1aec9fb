"""Settings of a worker's host memory and prefix cache."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.worker.kv.core.eviction import ORDERS

_MEBIBYTE = 1 << 20
_ROUNDING = 1e-9
_CACHE_SHARE = 0.8


class HostMemoryConfig(BaseModel):
    """Section `worker.host_memory`: one budget of host memory for KV. The prefix cache and other workers have
    their shares, and Pie has the rest. A part that is off leaves its share unused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mb: int = Field(default=1280, ge=0, description="host memory for KV, in MiB")
    blocks: int = Field(default=0, ge=0, description="the same in KV blocks; 0: use mb")
    cache_share: float | None = Field(
        default=None, ge=0, le=1, description="share for the prefix cache; unset: 0.8 of what is not lent"
    )
    lent_share: float = Field(
        default=0.0, ge=0, le=1, description="share for blocks of other workers; the rest is Pie's"
    )

    @property
    def cached_share(self) -> float:
        """Share for the prefix cache's evicted blocks."""
        return _CACHE_SHARE * (1.0 - self.lent_share) if self.cache_share is None else self.cache_share

    @property
    def pie_share(self) -> float:
        """Share for blocks that Pie moves out of the device."""
        rest = 1.0 - self.cached_share - self.lent_share
        return rest if rest > _ROUNDING else 0.0

    def bytes_of(self, share: float, block_bytes: int) -> int:
        """Return the size of a share in bytes."""
        return round((self.blocks * block_bytes or self.mb * _MEBIBYTE) * share)

    def blocks_of(self, share: float, block_bytes: int) -> int:
        """Return the number of blocks of a share."""
        return round(self.blocks * share) or self.bytes_of(share, block_bytes) // block_bytes

    @model_validator(mode="after")
    def _shares_of_one_whole(self) -> "HostMemoryConfig":
        if self.cached_share + self.lent_share > 1 + _ROUNDING:
            raise ValueError("cache_share and lent_share are of one memory and exceed 1: lower one")
        return self


class PrefixCacheConfig(BaseModel):
    """Section `worker.prefix_cache`. The first tier is the worker's own KV, the second its share of
    `host_memory`; sizes here are of those below."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    MOVED: ClassVar = dict.fromkeys(
        ("host_mb", "host_blocks"), "worker.host_memory.mb or .blocks, and .cache_share"
    )

    enabled: bool = Field(default=True, description="keep the KV of finished sequences for later ones")
    eviction: str = Field(
        default="frequent",
        description=f"eviction order: {', '.join(ORDERS)}, an installed one, or FILE.py:CLASS",
    )
    swap_share: float = Field(
        default=0.5, ge=0, le=1, description="share of the host tier for preempted sequences; 0: none"
    )
    shadow_share: float = Field(
        default=0.125,
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

    def peer_slots(self, block_bytes: int) -> int:
        """Return the number of blocks in other workers' host memory; 0: nothing is cached."""
        return (self.peer_blocks or self.peer_mb * _MEBIBYTE // block_bytes) if self.enabled else 0

    @model_validator(mode="after")
    def _a_disk_has_a_folder(self) -> "PrefixCacheConfig":
        if self.disk_mb and not self.disk_path:
            raise ValueError("disk_mb needs disk_path, a folder that outlives the worker")
        return self
