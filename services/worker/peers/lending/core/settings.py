"""Settings of what a worker lends and borrows."""

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class HostAttention(StrEnum):
    """Who attends to keys in a creditor's host memory."""

    AUTO = "auto"
    """The creditor where its engine runs on the CPU, else the debtor."""
    COMPUTE = "compute"
    """The creditor, on its CPU, as to keys on its device."""
    FETCH = "fetch"
    """The debtor: the creditor only keeps the blocks."""

    def attends(self, device: str) -> bool:
        """Whether a creditor whose engine runs on that type of device computes."""
        return self is HostAttention.COMPUTE or (self is HostAttention.AUTO and device == "cpu")


class LendingConfig(BaseModel):
    """Section `worker.lending`. Fractions are of the worker's own KV."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lend: bool = Field(default=True, description="let other workers use KV that is free here")
    max_lent_fraction: float = Field(default=0.5, ge=0, le=1, description="lent at most")
    host_mb: int = Field(
        default=0, ge=0, description="host memory, beside its own KV, for blocks of other workers, in MiB"
    )
    host_blocks: int = Field(default=0, ge=0, description="the same in blocks instead; 0: host_mb counts")
    host_attention: HostAttention = Field(
        default=HostAttention.AUTO,
        description="who attends to keys in lent host memory: this worker, or who fetches",
    )
    keep_free_fraction: float = Field(default=0.1, ge=0, le=1, description="never lent, kept for itself")
    borrow: bool | Literal["auto"] = Field(
        default="auto",
        description="ask other workers for KV: when little is free; `auto`: only for a sequence that is too "
        "long for this worker. Needs distributed attention",
    )
    low_fraction: float = Field(default=0.05, ge=0, le=1, description="with less free than this it borrows")
    high_fraction: float = Field(default=0.25, ge=0, le=1, description="with more free than this it returns")
    max_remote_attention_fraction: float = Field(
        default=0.25, ge=0, le=1, description="of its time, while it has work, for others' attention"
    )
    staging_blocks: int = Field(
        default=2, ge=1, description="fetched from one creditor at a time; takes twice so many, of one layer"
    )
    most_creditors: int = Field(default=8, ge=1, description="of one worker at a time")
    answer_s: float = Field(
        default=1.0, gt=0, description="a creditor that does not answer for one layer within this has failed"
    )
    link_bytes_per_s: float = Field(
        default=0.0, ge=0, description="attend at creditors no faster than that; 0: as fast as the link is"
    )
    bounce_blocks: int = Field(
        default=2, ge=0, description="of a borrower's own, kept to swap debts through; 0: it settles none"
    )
    recall: bool = Field(default=True, description="bring borrowed KV home when own memory is free")
    lease_s: float = Field(
        default=5.0, gt=0, description="a debtor that is silent for so long loses the blocks"
    )
    grace_s: float = Field(
        default=0.5, ge=0, description="how much longer than the debtor the creditor waits"
    )
    most_rounds: int = Field(default=3, ge=1, description="rounds of candidates before a search rests")
    rest_s: float = Field(default=0.5, ge=0, description="after a search that did not get everything")

    @model_validator(mode="after")
    def _marks_in_order(self) -> "LendingConfig":
        if self.low_fraction > self.high_fraction:
            raise ValueError("low_fraction must not be above high_fraction")
        return self
