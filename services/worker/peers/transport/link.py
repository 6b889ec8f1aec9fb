"""The asking side of a link over a stream socket. A transport's `Carriage` moves large payloads."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from services.worker.peers.transport import wire
from services.worker.peers.transport.base import (
    INLINE_BYTES,
    Buffer,
    Peer,
    PeerReply,
    TransportLimits,
    sizes_of,
)
from services.worker.peers.transport.digest import PayloadDigest, slices
from services.worker.peers.transport.pipe import Pipe
from shared.clock import monotonic_s
from shared.errors import InvalidMessage, MessageTooLarge, Overloaded, StaleEpoch


class Carriage(Protocol):
    """Moves large payloads from one end of a pipe to the other."""

    def open(self, pipe: Pipe, *, is_dialler: bool, until_s: float) -> None:
        """Set up, once after the greeting. Raises DeadlineExceeded, PeerLost and InvalidMessage."""
        ...

    def send(self, pipe: Pipe, buffers: Sequence[Buffer], until_s: float) -> None:
        """Send payload and digest. Raises DeadlineExceeded and PeerLost."""
        ...

    def receive(self, pipe: Pipe, groups: Iterable[list[Buffer]], until_s: float) -> bool:
        """Fill slices of the announced sizes; return whether the digest agrees. Raises as `send`."""
        ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...


class InStream:
    """Carriage by the socket itself. Each slice is verified while it is in the cache."""

    def open(self, pipe: Pipe, *, is_dialler: bool, until_s: float) -> None:
        """Nothing to set up."""

    def send(self, pipe: Pipe, buffers: Sequence[Buffer], until_s: float) -> None:
        made = PayloadDigest()
        for group in slices(buffers):
            pipe.send(group, until_s)
            made.update(group)
        pipe.send([made.value.to_bytes(wire.DIGEST_BYTES, "little")], until_s)

    def receive(self, pipe: Pipe, groups: Iterable[list[Buffer]], until_s: float) -> bool:
        made = PayloadDigest()
        for group in groups:
            pipe.fill(group, until_s)
            made.update(group)
        return int.from_bytes(pipe.take(wire.DIGEST_BYTES, until_s), "little") == made.value

    def close(self) -> None:
        """Nothing to release: the link owns the pipe."""


IN_STREAM = InStream()


def send_message(
    pipe: Pipe, carriage: Carriage, envelope: wire.Envelope, buffers: Sequence[Buffer], until_s: float
) -> None:
    """Send envelope and payload, small ones in one system call. Raises DeadlineExceeded and PeerLost."""
    head = wire.packed(envelope)
    payload_bytes = sum(envelope.sizes_bytes)
    if not payload_bytes:
        pipe.send([head], until_s)
    elif payload_bytes <= INLINE_BYTES:
        made = PayloadDigest()
        for group in slices(buffers):
            made.update(group)
        pipe.send([head, *buffers, made.value.to_bytes(wire.DIGEST_BYTES, "little")], until_s)
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
    way = carriage if payload_bytes > INLINE_BYTES else IN_STREAM
    return way.receive(pipe, groups, until_s)


class SocketCall:
    """A `base.Call` over a stream socket."""

    __slots__ = ("into", "link", "number", "until_s")

    def __init__(self, link: "SocketLink", number: int, into: Sequence[Buffer], until_s: float) -> None:
        self.link = link
        self.number = number
        self.into = into
        self.until_s = until_s

    def finish(self) -> PeerReply:
        return self.link.finish(self)


class SocketLink:
    """A `base.PeerLink` over a stream socket, made by `greet`."""

    def __init__(
        self, pipe: Pipe, carriage: Carriage, peer: Peer, transport: str, limits: TransportLimits
    ) -> None:
        self.peer = peer
        self.transport = transport
        self._pipe = pipe
        self._carriage = carriage
        self._limits = limits
        self._calls = 0
        self._outstanding: deque[SocketCall] = deque()

    @property
    def closed(self) -> bool:
        return self._pipe.closed or (not self._outstanding and self._pipe.has_hung_up)

    def begin(
        self,
        kind: str,
        header: bytes = b"",
        buffers: Sequence[Buffer] = (),
        *,
        into: Sequence[Buffer] = (),
        deadline_s: float,
    ) -> SocketCall:
        sizes = tuple(sizes_of(buffers))
        wire.check_size(len(header), sizes, self._limits)
        self._check_pipelining(sum(sizes))
        number = self._calls + 1
        until_s = monotonic_s() + deadline_s
        envelope = wire.Envelope(wire.REQUEST, number, header, kind, sizes, max(1, int(deadline_s * 1e3)))
        try:
            send_message(self._pipe, self._carriage, envelope, buffers, until_s)
        except BaseException:
            self.close()
            raise
        self._calls = number
        call = SocketCall(self, number, into, until_s)
        self._outstanding.append(call)
        return call

    def ask(
        self,
        kind: str,
        header: bytes = b"",
        buffers: Sequence[Buffer] = (),
        *,
        into: Sequence[Buffer] = (),
        deadline_s: float,
    ) -> PeerReply:
        return self.finish(self.begin(kind, header, buffers, into=into, deadline_s=deadline_s))

    def finish(self, call: SocketCall) -> PeerReply:
        """See `base.Call`. A call out of turn raises InvalidMessage and closes the link."""
        if not self._outstanding or self._outstanding[0] is not call:
            self.close()
            raise InvalidMessage("calls of a link finish in the order they began, each once")
        self._outstanding.popleft()
        try:
            envelope = receive_envelope(self._pipe, self._limits, call.until_s)
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

    @property
    def raw(self) -> Pipe:
        return self._pipe

    def close(self) -> None:
        self._pipe.close()
        self._carriage.close()

    def _receive(self, envelope: wire.Envelope, call: SocketCall) -> PeerReply:
        sizes = envelope.sizes_bytes
        targets = call.into[: len(sizes)]
        if list(sizes) != sizes_of(targets):
            raise InvalidMessage("the reply's buffers do not fit the requested ones")
        groups = slices(targets)
        if not receive_payload(self._pipe, self._carriage, sum(sizes), groups, call.until_s):
            raise InvalidMessage("the reply was corrupted in transit")
        return PeerReply(envelope.header, len(sizes))

    def _check_pipelining(self, payload_bytes: int) -> None:
        if not self._outstanding:
            return
        if payload_bytes > INLINE_BYTES:
            raise MessageTooLarge("a large message must wait until earlier calls of the link have finished")
        if len(self._outstanding) >= self._limits.outstanding:
            raise Overloaded(f"{len(self._outstanding)} calls of this link have not finished")


def greet(
    pipe: Pipe,
    carriage: Carriage,
    names: tuple[Peer, Peer],
    ticket: bytes,
    transport: str,
    until_s: float,
    limits: TransportLimits | None = None,
) -> SocketLink:
    """Return the link between `names` (this worker, its peer), or raise as `BulkTransport.dial`."""
    own, peer = names
    limits = limits or TransportLimits()
    try:
        opening = receive_envelope(pipe, limits, until_s)
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
        envelope = receive_envelope(pipe, limits, until_s)
        if envelope.type != wire.WELCOME:
            raise wire.error_from(envelope.header)
        if envelope.header != wire.welcome_proof(ticket, opening.header):
            raise StaleEpoch(f"not worker {peer.worker_id}: the answering process does not know the ticket")
        carriage.open(pipe, is_dialler=True, until_s=until_s)
    except BaseException:
        pipe.close()
        carriage.close()
        raise
    return SocketLink(pipe, carriage, peer, transport, limits)
