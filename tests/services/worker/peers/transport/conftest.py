"""A transport, a desk with receivers behind a listener in this process, and another worker's process."""

import signal
from collections.abc import Callable, Iterator

import pytest

from services.worker.peers.transport.base import (
    Peer,
    PeerLink,
    TransportLimits,
)
from services.worker.peers.transport.server import BulkTransport, SocketListener, WorkerDesk
from shared.errors import ConfigError
from tests.services.worker.peers.transport.peer import TRANSPORTS, Process
from tests.services.worker.peers.transport.receivers import Counts, furnish

OWN = Peer("worker-own", 3)
LIMITS = TransportLimits(header_bytes=1 << 16, buffers=4096, message_bytes=64 << 20, links=8, idle_s=30.0)


class End:
    """A desk of this process, its listener, and its receivers' counters."""

    def __init__(self, transport: BulkTransport) -> None:
        self.transport = transport
        self.desk = WorkerDesk(OWN, LIMITS)
        self.counts: Counts = furnish(self.desk)
        self.listener: SocketListener = transport.listen(self.desk)

    def ticket(self, peer: Peer) -> bytes:
        return self.desk.issue(peer, valid_for_s=30.0)

    def enter(self, peer: Peer, own: Peer = OWN, ticket: bytes | None = None) -> PeerLink:
        """Return a link from `peer` to `own`, by a new ticket unless one is given."""
        shown = self.ticket(peer) if ticket is None else ticket
        return self.transport.dial(self.listener.address, peer, own, shown, deadline_s=5.0)

    def dial_in(self, process: Process) -> None:
        """Let the other process dial this one."""
        ticket = self.ticket(process.peer).hex()
        assert process.ask("dial", self.listener.address, OWN.worker_id, OWN.incarnation, ticket) == "ok"


@pytest.fixture(params=list(TRANSPORTS))
def transport(request: pytest.FixtureRequest) -> BulkTransport:
    try:
        return TRANSPORTS[request.param]()
    except ConfigError as error:
        pytest.skip(error.message)


@pytest.fixture
def end(transport: BulkTransport) -> Iterator[End]:
    made = End(transport)
    yield made
    assert made.listener.close(10.0)


@pytest.fixture
def process(transport: BulkTransport) -> Iterator[Process]:
    made = Process(transport.name)
    yield made
    made.send_signal(signal.SIGCONT)
    made.end()


Dial = Callable[[], PeerLink]


@pytest.fixture
def dial(transport: BulkTransport, process: Process) -> Iterator[Dial]:
    """Yield a function that dials the other process, and close its links at the end."""
    made: list[PeerLink] = []

    def make_link() -> PeerLink:
        ticket = process.ticket(OWN)
        made.append(transport.dial(process.address, OWN, process.peer, ticket, deadline_s=10.0))
        return made[-1]

    yield make_link
    for link in made:
        link.close()
