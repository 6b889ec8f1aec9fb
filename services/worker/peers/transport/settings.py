"""Settings of a worker's bulk plane, and its transports."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from services.worker.peers.transport.server import BulkTransport
from services.worker.peers.transport.shm import ShmTransport
from services.worker.peers.transport.tcp import TcpTransport
from services.worker.peers.transport.ucx import UcxTransport


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


def make_transports(config: BulkConfig) -> list[BulkTransport]:
    """Return the configured transports. Raises ConfigError for `ucx` without ucxx."""
    made: list[BulkTransport] = []
    for name in dict.fromkeys(config.transports):
        if name == "tcp":
            made.append(TcpTransport(config.bind, config.port, config.advertise))
        elif name == "shm":
            made.append(ShmTransport())
        else:
            made.append(UcxTransport(config.bind, 0, config.advertise))
    return made
