"""Settings of a worker's cooperation with others: lending, moves of blocks, and the bulk plane."""

from enum import StrEnum
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


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


class LendingConfig(BaseModel):
    """Section `worker.lending`. Fractions are of the worker's own KV."""

    model_config = ConfigDict(frozen=True, extra="forbid")
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


class BulkConfig(BaseModel):
    """Section `worker.bulk`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    transports: tuple[Literal["tcp", "shm", "ucx"], ...] = Field(
        default=("shm", "tcp"), description="transports that other workers may dial; none: no bulk plane"
    )
    bind: str = Field(default="127.0.0.1", description="address to listen on, for tcp and ucx")
    port: int = Field(default=0, ge=0, le=65535, description="port of tcp; 0: a free one, as always for ucx")
    advertise: str = Field(default="", description="host that others dial; empty: `bind`")
    ticket_s: float = Field(default=10.0, gt=0, description="time for which a ticket to dial is valid")
