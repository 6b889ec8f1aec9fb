"""The ledger's settings."""

from pydantic import Field

from shared.config import ServiceConfig


class LedgerConfig(ServiceConfig):
    """Section `ledger`."""

    worker_timeout_s: float = Field(
        default=2.0, gt=0, description="a worker silent for longer is struck from the table"
    )
    settle: bool = Field(default=True, description="have cycles of debts settled (DGFM)")
    settle_threshold_tokens: int = Field(
        default=128, ge=1, description="a cycle is settled for no less; in whole blocks of its workers"
    )
    settle_interval_s: float = Field(default=2.0, gt=0, description="between two looks for cycles")
    settle_valid_s: float = Field(
        default=5.0, gt=0, description="a worker that hears nothing for so long gives a settlement up"
    )
