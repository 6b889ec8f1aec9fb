"""The ledger's settings."""

from pydantic import Field

from shared.config import ServiceConfig


class LedgerConfig(ServiceConfig):
    """Section `ledger`."""

    worker_timeout_s: float = Field(
        default=2.0, gt=0, description="a worker silent for longer is struck from the table"
    )
