"""The transports under test, by name."""

from collections.abc import Callable

from services.worker.peers.transport.base import BulkTransport
from services.worker.peers.transport.shm import ShmTransport
from services.worker.peers.transport.tcp import TcpTransport
from services.worker.peers.transport.ucx import UcxTransport

TRANSPORTS: dict[str, Callable[[], BulkTransport]] = {
    "tcp": TcpTransport,
    "shm": ShmTransport,
    "ucx": UcxTransport,
}


def make(name: str) -> BulkTransport:
    """Raises KeyError, and ConfigError where it is not installed."""
    return TRANSPORTS[name]()
