"""Settings of a worker's parts: host memory, prefix cache, peers, Pie, and engines other than `native`."""

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from services.worker.kv.core.eviction import ORDERS

_MEBIBYTE = 1 << 20
_ROUNDING = 1e-9
_CACHE_SHARE = 0.8


class Section(BaseModel):
    """Part of section `worker`, which knows all of its settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class HostMemoryConfig(Section):
    """Section `worker.host_memory`: one budget of host memory for KV. The prefix cache and other workers have
    their shares, and Pie has the rest. A part that is off leaves its share unused."""

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


class PrefixCacheConfig(Section):
    """Section `worker.prefix_cache`. The first tier is the worker's own KV, the second its share of
    `host_memory`; sizes here are of those below."""

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


class HostAttention(StrEnum):
    """Which worker attends to keys in a creditor's host memory."""

    AUTO = "auto"
    """The creditor where its engine runs on the CPU, else the debtor."""
    COMPUTE = "compute"
    """The creditor, on its CPU, as to keys on its device."""
    FETCH = "fetch"
    """The debtor; the creditor only stores the blocks."""

    def attends(self, device: str) -> bool:
        """Return whether a creditor with an engine on that type of device computes."""
        return self is HostAttention.COMPUTE or (self is HostAttention.AUTO and device == "cpu")


class LendingConfig(Section):
    """Section `worker.lending`. Fractions are of the worker's own KV."""

    MOVED: ClassVar = dict.fromkeys(
        ("host_mb", "host_blocks"), "worker.host_memory.mb or .blocks, and .lent_share"
    )

    lend: bool = Field(default=True, description="lend free KV memory to other workers")
    max_lent_fraction: float = Field(default=0.5, ge=0, le=1, description="most of it to lend")
    host_attention: HostAttention = Field(
        default=HostAttention.AUTO, description="which worker attends to keys in lent host memory"
    )
    keep_free_fraction: float = Field(default=0.1, ge=0, le=1, description="free memory that is never lent")
    borrow: bool | Literal["auto"] = Field(
        default="auto",
        description="borrow KV memory when little is free; `auto`: only for a sequence too long for this "
        "worker. Needs distributed attention",
    )
    low_fraction: float = Field(default=0.05, ge=0, le=1, description="borrow when less is free")
    high_fraction: float = Field(default=0.25, ge=0, le=1, description="return blocks when more is free")
    max_remote_attention_fraction: float = Field(
        default=0.25, ge=0, le=1, description="share of time for others' attention while it has work"
    )
    staging_blocks: int = Field(
        default=2,
        ge=1,
        description="blocks fetched from a creditor at once; memory holds twice as many of one layer",
    )
    most_creditors: int = Field(default=8, ge=1, description="creditors of one worker at a time")
    answer_s: float = Field(
        default=1.0, gt=0, description="a creditor that does not answer for one layer in time has failed"
    )
    link_bytes_per_s: float = Field(
        default=0.0, ge=0, description="limit on the speed of attention at creditors; 0: none"
    )
    bounce_blocks: int = Field(
        default=2, ge=0, description="blocks a borrower keeps to settle debts through; 0: it settles none"
    )
    recall: bool = Field(default=True, description="bring borrowed KV home into free memory")
    lease_s: float = Field(
        default=5.0, gt=0, description="a debtor that is silent for longer loses its blocks"
    )
    grace_s: float = Field(default=0.5, ge=0, description="extra time before the creditor ends a lease")
    rest_s: float = Field(default=0.5, ge=0, description="pause after a search that did not get everything")

    @model_validator(mode="after")
    def _marks_in_order(self) -> "LendingConfig":
        if self.low_fraction > self.high_fraction:
            raise ValueError("low_fraction must not be above high_fraction")
        return self


class TransferConfig(Section):
    """Section `worker.transfer`."""

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


class BulkConfig(Section):
    """Section `worker.bulk`."""

    transports: tuple[Literal["tcp", "shm", "ucx"], ...] = Field(
        default=("shm", "tcp"), description="transports that other workers may dial; none: no bulk plane"
    )
    bind: str = Field(default="127.0.0.1", description="address to listen on, for tcp and ucx")
    port: int = Field(default=0, ge=0, le=65535, description="port of tcp; 0: a free one, as always for ucx")
    advertise: str = Field(default="", description="host that others dial; empty: `bind`")
    ticket_s: float = Field(default=10.0, gt=0, description="time for which a ticket to dial is valid")


class PieSettings(Section):
    """Some blocks of all layers in host memory, brought in behind the computation. Rates in bytes per
    second."""

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


class SimulatedConfig(Section):
    """Section `worker.simulated`, used with `worker.engine: simulated`."""

    cost: str = Field(default="opt-13b-a100", description="cost model of a step, by name")
    speed: float = Field(default=1.0, gt=0, description="seconds of the cost model that pass in one second")


VLLM_BLOCK_TOKENS = 32
"""Block sizes of vLLM's CPU kernels are multiples of this."""


class VllmConfig(Section):
    """Section `worker.vllm`, used with `worker.engine: vllm`."""

    eager: bool = Field(
        default=True, description="compute as the model is written; off: compiled, faster, a minute at first"
    )
    tensor_parallel: int = Field(
        default=1, ge=1, description="processes that each compute a part of every layer; on a CPU"
    )
    model_runner: Literal["auto", "v1", "v2"] = Field(
        default="auto", description="of vLLM's two: the one that it chooses itself, or this one"
    )
    adapters: dict[Annotated[str, StringConstraints(pattern=r"^[\w.-]{1,100}$")], str] = Field(
        default={},
        description="LoRA adapters: {NAME: FOLDER}, equal on all workers; clients ask for MODEL:NAME",
    )
    max_rows: int = Field(default=256, ge=1, description="sequences that vLLM's buffers hold in one step")
    max_step_tokens: int = Field(
        default=2048, ge=32, description="tokens that they hold; longer steps are computed in parts"
    )
