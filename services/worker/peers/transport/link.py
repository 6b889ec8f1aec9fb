"""The asking side of a link over a stream socket, and what both sides do with a pipe."""

from collections import deque
from collections.abc import Iterable

from services.worker.peers.transport import wire
from services.worker.peers.transport.base import (
    INLINE_BYTES,
    Buffer,
    Buffers,
    Peer,
    PeerReply,
    TransportLimits,
    sizes_of,
)
from services.worker.peers.transport.digest import PayloadDigest, digest, slices
from services.worker.peers.transport.pipe import Pipe
from shared.clock import monotonic_s
from shared.errors import InvalidMessage, MessageTooLarge, Overloaded, StaleEpoch

LIMITS = TransportLimits()


class Carriage:
    """Moves large payloads from one end of a pipe to the other: here, by the socket itself.

    A transport may override it. All calls raise DeadlineExceeded and PeerLost."""

    def open(self, pipe: Pipe, *, is_dialler: bool, until_s: float) -> None:
        """Set up, once after the greeting. Raises InvalidMessage as well."""

    def send(self, pipe: Pipe, buffers: Buffers, until_s: float) -> None:
        """Send payload and digest."""
        made = PayloadDigest()
        for group in slices(buffers):
            pipe.send(group, until_s)
            made.update(group)
        pipe.send([made.packed()], until_s)

    def receive(self, pipe: Pipe, groups: Iterable[list[Buffer]], until_s: float) -> bool:
        """Fill slices of the announced sizes; return whether the digest agrees."""
        made = PayloadDigest()
        for group in groups:
            pipe.fill(group, until_s)
            made.update(group)  # While it is in the cache.
        return pipe.take(wire.DIGEST_BYTES, until_s) == made.packed()

    def close(self) -> None:
        """Release everything, after the pipe was closed. Idempotent."""


_IN_STREAM = Carriage()


def send_message(
    pipe: Pipe, carriage: Carriage, envelope: wire.Envelope, buffers: Buffers, until_s: float
) -> None:
    """Send envelope and payload, small ones in one system call. Raises DeadlineExceeded and PeerLost."""
    head = wire.packed(envelope)
    payload_bytes = sum(envelope.sizes_bytes)
    if not payload_bytes:
        pipe.send([head], until_s)
    elif payload_bytes <= INLINE_BYTES:
        pipe.send([head, *buffers, digest(buffers)], until_s)
    else:
        pipe.send([head], until_s)
        carriage.send(pipe, buffers, until_s)


def receive_envelope(pipe: Pipe, limits: TransportLimits, until_s: float) -> wire.Envelope:
    """Read an envelope. Raises DeadlineExceeded, PeerLost, InvalidMessage and MessageTooLarge."""
    length, crc = wire.envelope_bytes(pipe.take(wire.PREFIX.size, until_s), limits)
    return wire.unpacked(pipe.take(length, until_s), crc, limits)


def receive_payload(
    pipe: Pipe, carriage: Carriage, payload_bytes: int, groups: Iterable[list[Buffer]], until_s: float
) -> bool:
    """Read a payload; return whether its digest agrees. Raises DeadlineExceeded and PeerLost."""
    if not payload_bytes:
        return True
    way = carriage if payload_bytes > INLINE_BYTES else _IN_STREAM
    return way.receive(pipe, groups, until_s)


class Call:
    """A request that was sent, and whose reply was not read yet."""

    __slots__ = ("into", "link", "number", "until_s")

    def __init__(self, link: "PeerLink", number: int, into: Buffers, until_s: float) -> None:
        self.link = link
        self.number = number
        self.into = into
        self.until_s = until_s

    def finish(self) -> PeerReply:
        """Wait for the reply, until the deadline given to `begin`. Calls finish in the order they began.

        Raises DeadlineExceeded, PeerLost, or InvalidMessage for a reply that was corrupted or did not fit
        `into`: these close the link. Raises the KvasirError of the peer's receiver."""
        return self.link.finish(self)


class PeerLink:
    """A link to one peer by one transport, made by `greet`. For one thread at a time, which it blocks.

    From asyncio, use `asyncio.to_thread(link.ask, …)`. A side that gives up, on a deadline or an error,
    closes the link, and it is never used again; parts of `into` may be overwritten then."""

    def __init__(self, pipe: Pipe, carriage: Carriage, peer: Peer, transport: str) -> None:
        self.peer = peer
        self.transport = transport
        self.pipe = pipe
        """For the exchange after a reply (`Reply.sequel`). Close the link when that fails."""
        self._carriage = carriage
        self._calls = 0
        self._outstanding: deque[Call] = deque()

    @property
    def closed(self) -> bool:
        """Whether either end or an error closed the link, as far as is known here."""
        return self.pipe.closed or (not self._outstanding and self.pipe.has_hung_up)

    def begin(
        self, kind: str, header: bytes = b"", buffers: Buffers = (), *, into: Buffers = (), deadline_s: float
    ) -> Call:
        """Send a request. `buffers` may be reused on return; `into` belongs to the call until it finishes.

        The reply has at most as many buffers as `into`, each of exactly its target's size. Raises
        DeadlineExceeded and PeerLost, or MessageTooLarge and Overloaded when nothing was sent."""
        sizes = tuple(sizes_of(buffers))
        wire.check_size(len(header), sizes, LIMITS)
        if self._outstanding and sum(sizes) > INLINE_BYTES:
            raise MessageTooLarge("a large message must wait until earlier calls of the link have finished")
        if len(self._outstanding) >= LIMITS.outstanding:
            raise Overloaded(f"{len(self._outstanding)} calls of this link have not finished")
        call = Call(self, self._calls + 1, into, monotonic_s() + deadline_s)
        deadline_ms = max(1, int(deadline_s * 1e3))
        envelope = wire.Envelope(wire.REQUEST, call.number, header, kind, sizes, deadline_ms)
        try:
            send_message(self.pipe, self._carriage, envelope, buffers, call.until_s)
        except BaseException:
            self.close()
            raise
        self._calls = call.number
        self._outstanding.append(call)
        return call

    def ask(
        self, kind: str, header: bytes = b"", buffers: Buffers = (), *, into: Buffers = (), deadline_s: float
    ) -> PeerReply:
        """`begin(…).finish()`."""
        return self.finish(self.begin(kind, header, buffers, into=into, deadline_s=deadline_s))

    def finish(self, call: Call) -> PeerReply:
        """See `Call.finish`. A call out of turn raises InvalidMessage and closes the link."""
        if not self._outstanding or self._outstanding[0] is not call:
            self.close()
            raise InvalidMessage("calls of a link finish in the order they began, each once")
        self._outstanding.popleft()
        try:
            envelope = receive_envelope(self.pipe, LIMITS, call.until_s)
            if envelope.type == wire.FAILURE:
                raise wire.error_from(envelope.header)
            if envelope.call != call.number:
                raise InvalidMessage(f"a reply to call {envelope.call} instead of {call.number}")
            if envelope.type == wire.REPLY:
                return self._receive(envelope, call)
            if envelope.type != wire.REFUSAL:
                raise InvalidMessage(f"a message of type {envelope.type} instead of a reply")
            error = wire.error_from(envelope.header)
        except BaseException:
            self.close()
            raise
        raise error

    def close(self) -> None:
        """Abort what is under way. Idempotent; the only method for other threads."""
        self.pipe.close()
        self._carriage.close()

    def _receive(self, envelope: wire.Envelope, call: Call) -> PeerReply:
        sizes = envelope.sizes_bytes
        targets = call.into[: len(sizes)]
        if list(sizes) != sizes_of(targets):
            raise InvalidMessage("the reply's buffers do not fit the requested ones")
        if not receive_payload(self.pipe, self._carriage, sum(sizes), slices(targets), call.until_s):
            raise InvalidMessage("the reply was corrupted in transit")
        return PeerReply(envelope.header, len(sizes))


def greet(
    pipe: Pipe, carriage: Carriage, names: tuple[Peer, Peer], ticket: bytes, transport: str, until_s: float
) -> PeerLink:
    """Return the link between `names` (this worker, its peer), or raise as `TcpTransport.dial`."""
    own, peer = names
    try:
        opening = receive_envelope(pipe, LIMITS, until_s)
        if opening.type != wire.CHALLENGE:
            raise wire.error_from(opening.header)
        body = wire.Hello(
            own.worker_id,
            own.incarnation,
            peer.worker_id,
            peer.incarnation,
            wire.ticket_name(ticket),
            wire.greeting_proof(ticket, opening.header),
        )
        pipe.send([wire.packed(wire.Envelope(wire.HELLO, 0, wire.to_bytes(body)))], until_s)
        envelope = receive_envelope(pipe, LIMITS, until_s)
        if envelope.type != wire.WELCOME:
            raise wire.error_from(envelope.header)
        if envelope.header != wire.welcome_proof(ticket, opening.header):
            raise StaleEpoch(f"not worker {peer.worker_id}: the answering process does not know the ticket")
        carriage.open(pipe, is_dialler=True, until_s=until_s)
    except BaseException:
        pipe.close()
        carriage.close()
        raise
    return PeerLink(pipe, carriage, peer, transport)
