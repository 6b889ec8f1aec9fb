"""The ledger's settings."""

from pydantic import Field

from shared.config import ServiceConfig


class LedgerConfig(ServiceConfig):
    """Section `ledger`."""

    worker_timeout_s: float = Field(
        default=2.0, gt=0, description="a worker silent for longer is dropped from the table"
    )
    settle: bool = Field(default=True, description="settle cycles of debts (DGFM)")
    settle_threshold_tokens: int = Field(
        default=128, ge=1, description="smallest amount to settle, in whole blocks of the workers"
    )
    settle_interval_s: float = Field(default=2.0, gt=0, description="time between two searches for cycles")
    settle_valid_s: float = Field(
        default=5.0, gt=0, description="a worker that hears nothing for longer gives a settlement up"
    )
