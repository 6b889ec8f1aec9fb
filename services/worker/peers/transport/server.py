"""The answering side of links over stream sockets: one thread accepts, and one thread serves each link.

A receiver computes or copies, and should start within microseconds of a request: hence a thread per link.
There are as many links as peers, not as requests. Knows sockets only, and no receiver's content.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hmac import compare_digest
from secrets import token_bytes
from typing import NoReturn

from services.worker.peers.transport import wire
from services.worker.peers.transport.base import (
    Buffer,
    Peer,
    Receiver,
    Reception,
    Reply,
    TransportLimits,
    sizes_of,
)
from services.worker.peers.transport.digest import SLICE_BYTES, sizes_as_slices, slices
from services.worker.peers.transport.link import (
    LIMITS,
    Carriage,
    receive_envelope,
    receive_payload,
    send_message,
)
from services.worker.peers.transport.pipe import Pipe
from shared.clock import Clock, monotonic_s
from shared.errors import (
    CallerError,
    DeadlineExceeded,
    InvalidMessage,
    InvalidRequest,
    KvasirError,
    Overloaded,
    PeerLost,
    StaleEpoch,
    Unauthorized,
    to_wire,
)
from shared.liveness import Incarnations
from shared.messages.base import decode

_log = logging.getLogger("kvasir.worker.bulk")
_HELLO_S = 2.0
_HELLO_LIMITS = TransportLimits(header_bytes=4096, buffers=0)
_MOST_S = 60.0
"""Longest deadline of a request, whatever the peer asks for."""
_PART_S = 1.0
_CHALLENGE_BYTES = 16
_MOST_STRANGERS = 64
"""Most connections without a ticket. The next one replaces the oldest."""
_ACCEPT_POLL_S = 0.5

_TICKET_BYTES = 24
_MOST_TICKETS = 64
"""Unused tickets of one peer. The limit is per peer, so one that floods delays only itself."""


@dataclass(frozen=True, slots=True)
class _Ticket:
    secret: bytes
    peer: Peer
    until_s: float


class WorkerDesk:
    """Desk of one worker for all its listeners: issues tickets, and knows the receiver of each kind of
    message. Any thread may call it."""

    def __init__(self, own: Peer, limits: TransportLimits = LIMITS, clock: Clock = monotonic_s) -> None:
        self.own = own
        self.limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._receivers: dict[str, Receiver] = {}
        self._tickets: dict[bytes, _Ticket] = {}
        """By name."""
        self._lives = Incarnations()

    def serve(self, receivers: Mapping[str, Receiver]) -> None:
        """Register receivers by kind, in place of any earlier ones."""
        self._receivers.update(receivers)

    def receiver(self, kind: str) -> Receiver:
        """Return the receiver of a kind. Raises InvalidRequest when there is none."""
        found = self._receivers.get(kind)
        if found is None:
            raise InvalidRequest(f"worker {self.own.worker_id} takes no messages of kind {kind!r}")
        return found

    def issue(self, peer: Peer, *, valid_for_s: float) -> bytes:
        """Return a ticket for one dial of this peer. Ends the links of its earlier incarnations.

        Raises Overloaded when it has too many, Unauthorized for an incarnation that was replaced."""
        now_s = self._clock()
        with self._lock:
            if not self._lives.hear(peer.worker_id, peer.incarnation, now_s):
                raise Unauthorized(f"worker {peer.worker_id} was replaced by a later incarnation")
            self._tickets = {key: one for key, one in self._tickets.items() if one.until_s > now_s}
            if sum(one.peer.worker_id == peer.worker_id for one in self._tickets.values()) >= _MOST_TICKETS:
                raise Overloaded(f"{_MOST_TICKETS} tickets have not been used", retry_after_s=1.0)
            ticket = token_bytes(_TICKET_BYTES)
            self._tickets[wire.ticket_name(ticket)] = _Ticket(ticket, peer, now_s + valid_for_s)
        return ticket

    def enter(self, peer: Peer, ticket_name: bytes) -> bytes:
        """Use up the ticket of that name and return it. Raises Unauthorized."""
        with self._lock:
            found = self._tickets.pop(ticket_name, None)
        if found is None or found.peer != peer or found.until_s <= self._clock():
            raise Unauthorized("this ticket was not issued, was used, or has expired: ask for another")
        if not self.is_current(peer):
            raise Unauthorized(f"worker {peer.worker_id} was replaced by a later incarnation")
        return found.secret

    def is_current(self, peer: Peer) -> bool:
        """Return False when a later incarnation of the peer is known."""
        return self._lives.present(peer.worker_id) in (None, peer.incarnation)


Wrap = Callable[[socket.socket, float], tuple[Pipe, Carriage]]
"""Makes a pipe and carriage of an accepted socket by a deadline. Raises KvasirError or OSError."""


class SocketListener:
    """Serves links on a listening socket, which it takes over, until it is closed."""

    def __init__(
        self, sock: socket.socket, address: str, transport: str, desk: WorkerDesk, wrap: Wrap
    ) -> None:
        self.address = address
        self._sock = sock
        self._transport = transport
        self._desk = desk
        self._wrap = wrap
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, threading.Thread] = {}
        self.links: dict[socket.socket, threading.Thread] = {}
        """Open connections that have shown a ticket."""
        self._closing = False
        sock.settimeout(_ACCEPT_POLL_S)
        self._thread = threading.Thread(target=self._accept, name=f"bulk-{transport}", daemon=True)
        self._thread.start()

    def close(self, deadline_s: float) -> bool:
        """Close every link and end the threads. False when some receiver did not return in time."""
        self._closing = True
        until_s = monotonic_s() + deadline_s
        _hang_up(self._sock)
        self._thread.join(deadline_s)
        self._sock.close()
        with self._lock:
            ending = self._strangers | self.links
            for sock in ending:
                _hang_up(sock)
        for thread in ending.values():
            thread.join(max(0.0, until_s - monotonic_s()))
        return not any(thread.is_alive() for thread in (self._thread, *ending.values()))

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._sock.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if not self._closing:
                    _log.warning("%s: no link accepted: %s", self._transport, error)
                    threading.Event().wait(_ACCEPT_POLL_S)
                continue
            self._start(sock)

    def _start(self, sock: socket.socket) -> None:
        with self._lock:
            if self._closing:
                sock.close()
                return
            if len(self._strangers) >= _MOST_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                _hang_up(oldest)
            name = f"bulk-{self._transport}-link"
            thread = threading.Thread(target=self._serve, args=(sock,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # The system is out of threads for now.
                sock.close()
                _log.warning("%s: no link accepted: %s", self._transport, error)
                return
            self._strangers[sock] = thread

    def _enter(self, sock: socket.socket) -> None:
        """Admit a connection that showed a ticket. Raises Overloaded, or PeerLost when it was replaced."""
        with self._lock:
            thread = self._strangers.pop(sock, None)
            if thread is None:
                raise PeerLost("the greeting took too long while others waited")
            most = self._desk.limits.links
            if len(self.links) >= most:
                raise Overloaded(f"{most} links are open: close some", retry_after_s=1.0)
            self.links[sock] = thread

    def _serve(self, sock: socket.socket) -> None:
        """Thread of one link."""
        try:
            pipe, carriage = self._wrap(sock, monotonic_s() + _HELLO_S)
            try:
                Served(pipe, carriage, self._desk).run(lambda: self._enter(sock))
            finally:
                pipe.close()
                carriage.close()
        except (KvasirError, OSError) as error:
            _log.debug("a link by %s ended: %s", self._transport, error)
        except Exception:
            _log.exception("a link by %s failed", self._transport)
        finally:
            with self._lock:
                self._strangers.pop(sock, None)
                self.links.pop(sock, None)
            sock.close()


def _hang_up(sock: socket.socket) -> None:
    """Shut the socket down: its thread notices and closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class Served:
    """The answering side of one link, on the thread that calls `run`."""

    def __init__(self, pipe: Pipe, carriage: Carriage, desk: WorkerDesk) -> None:
        self._pipe = pipe
        self._carriage = carriage
        self._desk = desk
        self._peer = Peer("", 0)

    def run(self, enter: Callable[[], None]) -> None:
        """Serve until the link ends, and raise the KvasirError that ended it.

        `enter` is called once the peer has shown a ticket, and raises when there is no room."""
        self._greet(enter)
        while True:
            self._pipe.wait(monotonic_s() + self._desk.limits.idle_s)
            envelope = self._next()
            until_s = monotonic_s() + min(envelope.deadline_ms / 1e3, _MOST_S)
            self._answer(envelope, until_s)
            if not self._desk.is_current(self._peer):
                raise self._stale()

    def _greet(self, enter: Callable[[], None]) -> None:
        until_s = monotonic_s() + _HELLO_S
        challenge = token_bytes(_CHALLENGE_BYTES)
        self._pipe.send([wire.packed(wire.Envelope(wire.CHALLENGE, 0, challenge))], until_s)
        envelope = receive_envelope(self._pipe, _HELLO_LIMITS, until_s)
        try:
            if envelope.type != wire.HELLO:
                raise Unauthorized("a link begins with a greeting")
            hello = decode(envelope.header, wire.Hello)
            if Peer(hello.peer_id, hello.peer_incarnation) != self._desk.own:
                raise StaleEpoch(f"this is not the dialled incarnation of {hello.peer_id}")
            self._peer = Peer(hello.own_id, hello.own_incarnation)
            ticket = self._desk.enter(self._peer, hello.ticket_name)
            if not compare_digest(hello.proof, wire.greeting_proof(ticket, challenge)):
                raise Unauthorized("this greeting was made without the ticket or for another link")
            enter()
        except KvasirError as error:
            self._fail(0, error, until_s)
        welcome = wire.Envelope(wire.WELCOME, 0, wire.welcome_proof(ticket, challenge))
        self._pipe.send([wire.packed(welcome)], until_s)
        self._carriage.open(self._pipe, is_dialler=False, until_s=until_s)

    def _next(self) -> wire.Envelope:
        until_s = monotonic_s() + _MOST_S
        try:
            envelope = receive_envelope(self._pipe, self._desk.limits, until_s)
            if envelope.type != wire.REQUEST:
                raise InvalidMessage(f"a message of type {envelope.type} instead of a request")
        except CallerError as error:
            self._fail(0, error, until_s)
        return envelope

    def _answer(self, envelope: wire.Envelope, until_s: float) -> None:
        sizes = envelope.sizes_bytes
        try:
            reception = self._admit(envelope)
        except Exception as error:
            scratch = memoryview(bytearray(min(SLICE_BYTES, sum(sizes))))
            self._receive(sizes, sizes_as_slices(sizes, scratch), until_s)
            self._refuse(envelope.call, error, until_s)
            return
        is_committed = False
        try:
            if not self._receive(sizes, slices(reception.buffers), until_s):
                self._fail(envelope.call, InvalidMessage("the message was corrupted in transit"), until_s)
            if self._pipe.has_hung_up:
                raise PeerLost("the peer gave up before its message was processed")
            is_committed = True
        finally:
            if not is_committed:
                reception.abandon()
        try:
            reply = reception.commit()
        except Exception as error:
            self._refuse(envelope.call, error, until_s)
            return
        self._send(envelope.call, reply, until_s)
        if reply.sequel is not None:
            reply.sequel(self._pipe)

    def _stale(self) -> StaleEpoch:
        return StaleEpoch(f"worker {self._peer.worker_id} was replaced by a later incarnation")

    def _admit(self, envelope: wire.Envelope) -> Reception:
        if not self._desk.is_current(self._peer):
            raise self._stale()
        receiver = self._desk.receiver(envelope.kind)
        reception = receiver(self._peer, envelope.header, envelope.sizes_bytes)
        if sizes_of(reception.buffers) != list(envelope.sizes_bytes):
            reception.abandon()
            raise ValueError(f"the receiver of {envelope.kind!r} has buffers of other sizes")
        return reception

    def _receive(self, sizes: Sequence[int], groups: Iterable[list[Buffer]], until_s: float) -> bool:
        return receive_payload(self._pipe, self._carriage, sum(sizes), groups, until_s)

    def _send(self, call: int, reply: Reply, until_s: float) -> None:
        sizes = tuple(sizes_of(reply.buffers))
        wire.check_size(len(reply.header), sizes, self._desk.limits)
        envelope = wire.Envelope(wire.REPLY, call, reply.header, "", sizes)
        send_message(self._pipe, self._carriage, envelope, reply.buffers, until_s)

    def _refuse(self, call: int, error: Exception, until_s: float) -> None:
        """Send the error to the peer. The link goes on."""
        if not isinstance(error, KvasirError):
            _log.error("a receiver failed", exc_info=error)
        self._tell(wire.REFUSAL, call, error, until_s)

    def _fail(self, call: int, error: KvasirError, until_s: float) -> NoReturn:
        """Send the error to the peer if it still reads, then raise it to end the link."""
        with contextlib.suppress(PeerLost, DeadlineExceeded):
            self._tell(wire.FAILURE, call, error, until_s)
            self._pipe.part(min(until_s, monotonic_s() + _PART_S))
        raise error

    def _tell(self, type: int, call: int, error: Exception, until_s: float) -> None:
        envelope = wire.Envelope(type, call, wire.to_bytes(to_wire(error)))
        self._pipe.send([wire.packed(envelope)], until_s)
