"""A worker's bulk plane on the bus: tickets for those who ask, and links to those that are asked."""

from collections.abc import Mapping, Sequence

from services.worker.peers.transport.base import BulkTransport, Peer, PeerLink, Receiver
from services.worker.peers.transport.plane import PeerAddress, Plane
from shared import subjects
from shared.bus import Bus, Endpoint, Handler
from shared.clock import monotonic_s
from shared.errors import NoResponder
from shared.liveness import Incarnations
from shared.messages.lending import AskTicket, BulkTicket
from shared.messages.reports import WorkerReported

HANDLERS: tuple[Handler, ...] = (
    Endpoint(subjects.worker_dial.to, AskTicket, "issue_ticket", sender="worker_id"),
)
_DIAL_S = 2.0


class BulkPlane:
    """Of one worker. A ticket is valid for `ticket_s`."""

    def __init__(self, bus: Bus, host: str, transports: Sequence[BulkTransport], ticket_s: float) -> None:
        self._bus = bus
        self._host = host
        self._ticket_s = ticket_s
        self._own = Peer(bus.instance, bus.incarnation)
        self._plane = Plane(self._own, host, transports)
        self._lives = Incarnations()

    @property
    def addresses(self) -> Mapping[str, str]:
        """Where it listens, by transport."""
        return self._plane.addresses

    def open(self) -> None:
        """Raises ConfigError where it cannot listen."""
        self._plane.open()

    def serve(self, kind: str, receiver: Receiver) -> None:
        """See `WorkerDesk.serve`."""
        self._plane.desk.serve(kind, receiver)

    async def issue_ticket(self, asked: AskTicket) -> BulkTicket:
        """For a worker that will dial this one. Raises Unauthorized and Overloaded."""
        peer = Peer(asked.worker_id, asked.incarnation)
        return BulkTicket(
            incarnation=self._own.incarnation,
            addresses=dict(self._plane.addresses),
            host=self._host,
            ticket=self._plane.desk.issue(peer, valid_for_s=self._ticket_s),
        )

    async def dial(self, worker_id: str, incarnation: int) -> PeerLink:
        """Raises KvasirError: nobody answers, another life of it does, or not by any transport of ours."""
        first = await self._ask(worker_id)
        if first.incarnation != incarnation:
            raise NoResponder(f"worker {worker_id} was started anew")
        unused = [first.ticket]

        async def issue() -> bytes:
            return unused.pop() if unused else (await self._ask(worker_id)).ticket

        to = PeerAddress(Peer(worker_id, incarnation), first.host, first.addresses)
        return await self._plane.connect(to, issue, deadline_s=_DIAL_S)

    def on_transfer(self, link: PeerLink, size_bytes: int, took_s: float) -> None:
        """See `Plane.on_transfer`."""
        self._plane.on_transfer(link, size_bytes, took_s)

    def on_reported(self, report: WorkerReported) -> None:
        """A heartbeat: what was measured with an earlier life of a worker counts no more."""
        before = self._lives.present(report.worker_id)
        is_present = self._lives.hear(report.worker_id, report.incarnation, monotonic_s())
        if is_present and before not in (None, report.incarnation):
            self._plane.choice.on_lost(report.worker_id)

    async def _ask(self, worker_id: str) -> BulkTicket:
        asked = AskTicket(worker_id=self._own.worker_id, incarnation=self._own.incarnation)
        subject = subjects.worker_dial(worker_id, self._own.worker_id)
        return await self._bus.request(subject, asked, BulkTicket, deadline_s=_DIAL_S)

    def close(self) -> bool:
        """See `Plane.close`."""
        return self._plane.close()
