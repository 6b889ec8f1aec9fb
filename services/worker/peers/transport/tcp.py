"""Bulk transport by TCP, between workers that reach each other. Nothing is encrypted (`docs/bulk.md`)."""

import socket

from services.worker.peers.transport.base import Peer
from services.worker.peers.transport.link import Carriage, PeerLink, greet
from services.worker.peers.transport.pipe import Pipe
from services.worker.peers.transport.server import SocketListener, WorkerDesk
from shared.clock import monotonic_s
from shared.errors import ConfigError, DeadlineExceeded, InvalidRequest, NoResponder

_BACKLOG = 64


class TcpTransport:
    """Bulk transport by TCP. Addresses are `host:port`, IPv6 hosts in brackets."""

    name = "tcp"
    carriage: type[Carriage] = Carriage

    def __init__(self, bind: str = "127.0.0.1", port: int = 0, advertise: str = "") -> None:
        """Listens on `bind`:`port` (0: a free port); peers dial `advertise`, else `bind`."""
        self._bind = bind
        self._port = port
        self._advertise = advertise or bind

    def listen(self, desk: WorkerDesk) -> SocketListener:
        """Start to serve links. Raises ConfigError when it cannot."""
        family = socket.AF_INET6 if ":" in self._bind else socket.AF_INET
        try:
            sock = socket.create_server((self._bind, self._port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"the bulk plane cannot listen on {self._bind}:{self._port}: {error.strerror}",
                param="bulk.bind",
            ) from error
        host = f"[{self._advertise}]" if ":" in self._advertise else self._advertise
        address = f"{host}:{sock.getsockname()[1]}"
        return SocketListener(sock, address, self.name, desk, lambda one, _: (Pipe(one), self.carriage()))

    def dial(self, address: str, own: Peer, peer: Peer, ticket: bytes, *, deadline_s: float) -> PeerLink:
        """Return a link. Raises NoResponder when nothing answers, Unauthorized for the ticket, StaleEpoch
        for another incarnation, Overloaded when the peer has too many links, and DeadlineExceeded."""
        until_s = monotonic_s() + deadline_s
        try:
            sock = socket.create_connection(split_address(address), timeout=deadline_s)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{address} did not answer within {deadline_s:g} s") from error
        except OSError as error:
            raise NoResponder(f"nothing answers at {address}: {error.strerror or error}") from error
        return greet(Pipe(sock), self.carriage(), (own, peer), ticket, self.name, until_s)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port`. Raises InvalidRequest."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidRequest(f"{address!r} is no host:port")
    return host.strip("[]"), int(port)
