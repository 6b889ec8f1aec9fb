"""Who may come in, and who takes what they bring: tickets, incarnations and receivers of one worker.

One desk serves all listeners of a worker. Called from many threads. Knows no sockets.
"""

import secrets
import threading
from dataclasses import dataclass

from services.worker.peers.transport import wire
from services.worker.peers.transport.base import Peer, Receiver, TransportLimits
from shared.clock import Clock, monotonic_s
from shared.errors import InvalidRequest, Overloaded, Unauthorized
from shared.liveness import Incarnations

TICKET_BYTES = 24
_MOST_TICKETS = 64
"""Of one peer that have not been used: one that only asks takes nothing from the others."""


@dataclass(frozen=True, slots=True)
class _Ticket:
    secret: bytes
    peer: Peer
    until_s: float


class WorkerDesk:
    """`base.Desk`, and where tickets are issued and receivers registered."""

    def __init__(self, own: Peer, limits: TransportLimits | None = None, clock: Clock = monotonic_s) -> None:
        self.own = own
        self.limits = limits or TransportLimits()
        self._clock = clock
        self._lock = threading.Lock()
        self._receivers: dict[str, Receiver] = {}
        self._tickets: dict[bytes, _Ticket] = {}
        """By name."""
        self._lives = Incarnations()

    def serve(self, kind: str, receiver: Receiver) -> None:
        """From now on, instead of an earlier receiver of that kind."""
        with self._lock:
            self._receivers[kind] = receiver

    def receiver(self, kind: str) -> Receiver:
        """Raises InvalidRequest for a kind nobody serves here."""
        found = self._receivers.get(kind)
        if found is None:
            raise InvalidRequest(f"worker {self.own.worker_id} takes no messages of kind {kind!r}")
        return found

    def issue(self, peer: Peer, *, valid_for_s: float) -> bytes:
        """A ticket with which this peer may dial once. Ends the links of its earlier incarnations.

        Raises Overloaded when it has too many, Unauthorized for an incarnation that was replaced."""
        now_s = self._clock()
        with self._lock:
            if not self._lives.hear(peer.worker_id, peer.incarnation, now_s):
                raise Unauthorized(f"worker {peer.worker_id} was replaced by a later incarnation")
            self._tickets = {key: one for key, one in self._tickets.items() if one.until_s > now_s}
            if sum(one.peer.worker_id == peer.worker_id for one in self._tickets.values()) >= _MOST_TICKETS:
                raise Overloaded(f"{_MOST_TICKETS} tickets have not been used", retry_after_s=1.0)
            ticket = secrets.token_bytes(TICKET_BYTES)
            self._tickets[wire.ticket_name(ticket)] = _Ticket(ticket, peer, now_s + valid_for_s)
        return ticket

    def enter(self, peer: Peer, ticket_name: bytes) -> bytes:
        """Uses the ticket of that name up, and returns it. Raises Unauthorized."""
        with self._lock:
            found = self._tickets.pop(ticket_name, None)
        if found is None or found.peer != peer or found.until_s <= self._clock():
            raise Unauthorized("this ticket was not issued, is used up, or too old: ask for another")
        if not self.is_current(peer):
            raise Unauthorized(f"worker {peer.worker_id} was replaced by a later incarnation")
        return found.secret

    def is_current(self, peer: Peer) -> bool:
        """False when a later incarnation of the peer has been heard of."""
        return self._lives.present(peer.worker_id) in (None, peer.incarnation)
