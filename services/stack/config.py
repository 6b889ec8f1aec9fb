"""The stack's settings."""

from pydantic import Field

from shared.config import ServiceConfig


class StackConfig(ServiceConfig):
    """Section `stack`."""

    port: int = Field(default=8080, ge=0, le=65535, description="of the HTTP gateway; 0 takes a free one")
    nats_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="of nats-server; unset: 4222, or a free one when that is taken",
    )
    workers: int = Field(default=2, ge=1, le=256, description="how many worker processes")
    model: str | None = Field(
        default=None, description="folder or hub id; unset: what the services default to"
    )
    preload: bool = Field(
        default=True, description="workers are forked from one process that has imported torch"
    )
    start_timeout_s: float = Field(
        default=180.0, gt=0, description="not ready after this, the start has failed"
    )
    stop_grace_s: float = Field(default=8.0, gt=0, description="between SIGTERM and SIGKILL")
