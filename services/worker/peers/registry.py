"""A worker's registry of its peers: it dials them, and issues tickets to peers that dial this worker.

Heartbeats show which peers are alive. To dial one, the registry asks it for a ticket over the bus and picks a
transport that both have. `services.worker.peers.core.neighbours` holds the tables of peers and link speeds.
"""

import asyncio
from collections.abc import Sequence

from services.worker.peers.core.neighbours import Neighbours
from services.worker.peers.transport.base import Peer
from services.worker.peers.transport.link import PeerLink
from services.worker.peers.transport.plane import BulkTransport, PeerAddress, Plane
from shared import subjects
from shared.bus import Bus, Endpoint, Handler
from shared.clock import Clock, monotonic_s
from shared.errors import NoResponder
from shared.liveness import AwakeClock
from shared.messages.lending import AskTicket, BulkTicket
from shared.messages.reports import WorkerReported

HANDLERS: tuple[Handler, ...] = (
    Endpoint(subjects.worker_dial.to, AskTicket, "issue_ticket", sender="worker_id"),
)
_DIAL_S = 2.0
_LOOK_S = 0.5
"""Short enough for `AwakeClock` to tell time awake from time asleep."""


class Registry:
    """Peers of one worker. Its `plane` holds the listeners that serve the peers."""

    def __init__(
        self,
        bus: Bus,
        host: str,
        transports: Sequence[BulkTransport],
        ticket_s: float,
        clock: Clock = monotonic_s,
    ) -> None:
        """`ticket_s`: how long a ticket that this worker issues is valid."""
        self._bus = bus
        self._ticket_s = ticket_s
        self._own = Peer(bus.instance, bus.incarnation)
        self._awake_s = AwakeClock(clock, lambda: bus.connected)
        self.host = host
        self.neighbours = Neighbours(bus.instance)
        self.plane = Plane(self._own, host, transports)
        self.rates = self.plane.choice.rates

    async def watch(self) -> None:
        """Forget peers that fall silent, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for name in self.neighbours.silent(self._awake_s()):
                self.plane.choice.forget(name)

    def on_reported(self, report: WorkerReported) -> None:
        """Take in any worker's heartbeat. A restart drops the measurements of the earlier incarnation."""
        if self.neighbours.hear(report, self._awake_s()):
            self.plane.choice.forget(report.worker_id)

    async def issue_ticket(self, asked: AskTicket) -> BulkTicket:
        """Return a ticket for a worker that will dial this one. Raises Unauthorized and Overloaded."""
        peer = Peer(asked.worker_id, asked.incarnation)
        return BulkTicket(
            incarnation=self._own.incarnation,
            addresses=dict(self.plane.addresses),
            host=self.host,
            ticket=self.plane.desk.issue(peer, valid_for_s=self._ticket_s),
        )

    async def dial(self, worker_id: str, incarnation: int) -> PeerLink:
        """Return a new link to a worker. Raises KvasirError when no transport reaches that incarnation."""
        first = await self._ask_ticket(worker_id)
        if first.incarnation != incarnation:
            raise NoResponder(f"worker {worker_id} has restarted")
        unused = [first.ticket]

        async def issue() -> bytes:
            return unused.pop() if unused else (await self._ask_ticket(worker_id)).ticket

        to = PeerAddress(Peer(worker_id, incarnation), first.host, first.addresses)
        return await self.plane.connect(to, issue, deadline_s=_DIAL_S)

    async def _ask_ticket(self, worker_id: str) -> BulkTicket:
        asked = AskTicket(worker_id=self._own.worker_id, incarnation=self._own.incarnation)
        subject = subjects.worker_dial(worker_id, self._own.worker_id)
        return await self._bus.request(subject, asked, BulkTicket, deadline_s=_DIAL_S)
