"""The one registry of peers of a worker: who is there, how each is dialled, and how fast its links are.

Heartbeats say who is there. A link is dialled with a ticket that the peer gives over the bus, by the
transport that suits both; tickets for those who dial this worker are issued here as well. What is known of
the others and of their links lies in `services.worker.peers.core.neighbours`.
"""

import asyncio
from collections.abc import Sequence

from services.worker.peers.core.neighbours import Neighbours
from services.worker.peers.transport.base import Peer, PeerLink
from services.worker.peers.transport.plane import PeerAddress, Plane
from services.worker.peers.transport.server import BulkTransport
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
"""Often enough that time awake is told from time asleep (`AwakeTime`)."""


class Registry:
    """The peers of one worker. Its `plane` is where the worker listens and what others are served by."""

    def __init__(
        self,
        bus: Bus,
        host: str,
        transports: Sequence[BulkTransport],
        ticket_s: float,
        clock: Clock = monotonic_s,
    ) -> None:
        """A ticket is valid for `ticket_s`."""
        self._bus = bus
        self._ticket_s = ticket_s
        self._own = Peer(bus.instance, bus.incarnation)
        self._awake_s = AwakeClock(clock, lambda: bus.connected)
        self.host = host
        self.neighbours = Neighbours(bus.instance)
        self.plane = Plane(self._own, host, transports)
        self.rates = self.plane.choice.rates

    async def watch(self) -> None:
        """Notices who falls silent, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for name in self.neighbours.silent(self._awake_s()):
                self.plane.choice.forget(name)

    def on_reported(self, report: WorkerReported) -> None:
        """Any worker's heartbeat. What was measured with an earlier life of it counts no more."""
        if self.neighbours.hear(report, self._awake_s()):
            self.plane.choice.forget(report.worker_id)

    async def issue_ticket(self, asked: AskTicket) -> BulkTicket:
        """For a worker that will dial this one. Raises Unauthorized and Overloaded."""
        peer = Peer(asked.worker_id, asked.incarnation)
        return BulkTicket(
            incarnation=self._own.incarnation,
            addresses=dict(self.plane.addresses),
            host=self.host,
            ticket=self.plane.desk.issue(peer, valid_for_s=self._ticket_s),
        )

    async def dial(self, worker_id: str, incarnation: int) -> PeerLink:
        """Raises KvasirError: nobody answers, another life of it does, or not by any transport of ours."""
        first = await self._ask_ticket(worker_id)
        if first.incarnation != incarnation:
            raise NoResponder(f"worker {worker_id} was started anew")
        unused = [first.ticket]

        async def issue() -> bytes:
            return unused.pop() if unused else (await self._ask_ticket(worker_id)).ticket

        to = PeerAddress(Peer(worker_id, incarnation), first.host, first.addresses)
        return await self.plane.connect(to, issue, deadline_s=_DIAL_S)

    async def _ask_ticket(self, worker_id: str) -> BulkTicket:
        asked = AskTicket(worker_id=self._own.worker_id, incarnation=self._own.incarnation)
        subject = subjects.worker_dial(worker_id, self._own.worker_id)
        return await self._bus.request(subject, asked, BulkTicket, deadline_s=_DIAL_S)
