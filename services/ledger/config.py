"""The ledger's settings."""

from pydantic import Field

from shared.config import ServiceConfig


class LedgerConfig(ServiceConfig):
    """Section `ledger`."""

    worker_timeout_s: float = Field(
        default=2.0, gt=0, description="a worker silent for longer is struck from the table"
    )
    ledger_timeout_s: float = Field(
        default=2.0,
        gt=0,
        description="of several ledgers the one with the smallest id starts settlements, until it is silent "
        "for longer; a ledger that has just started listens for so long",
    )
    settle: bool = Field(default=True, description="have cycles of debts settled (DGFM)")
    settle_threshold_tokens: int = Field(
        default=128, ge=1, description="a cycle is settled for no less; in whole blocks of its workers"
    )
    settle_interval_s: float = Field(default=2.0, gt=0, description="between two looks for cycles")
    settle_valid_s: float = Field(
        default=5.0, gt=0, description="a worker that hears nothing for so long gives a settlement up"
    )
