"""A worker's bulk plane: its listeners, who may come in, and links to peers by the transport that suits each.

    plane = Plane(own, host, transports)
    plane.open()                                              # listens
    plane.desk.serve("kv.attend", receiver)                   # who takes what those that dialled send
    ticket = plane.desk.issue(peer, valid_for_s=10.0)         # with which that peer may dial, once
    link = await plane.connect(to, issue, deadline_s=2.0)     # by a ticket of theirs; the link is its owner's

Knows neither the bus nor what is sent.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from services.worker.peers.core.neighbours import TransportChoice
from services.worker.peers.transport.base import Buffer, Peer, PeerLink, Reply
from services.worker.peers.transport.server import BulkTransport, SocketListener, WorkerDesk
from shared.clock import Clock, monotonic_s
from shared.errors import (
    ConfigError,
    InvalidMessage,
    KvasirError,
    MessageTooLarge,
    NoResponder,
    StaleEpoch,
    Unauthorized,
)
from shared.messages.base import decode

KIND = "bulk.probe"
PROBE_BYTES = 2 << 20
_ROUNDS = 3
"""The first fills caches and windows, and does not count."""


class Probes:
    """`base.Receiver`: sends bytes of no meaning, as many as the header asks for."""

    def admit(self, peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> "_Probe":
        size_bytes = decode(header, int)
        if sizes_bytes:
            raise InvalidMessage("a probe brings nothing")
        if not 0 < size_bytes <= PROBE_BYTES:
            raise MessageTooLarge(f"a probe asks for at most {PROBE_BYTES} bytes")
        return _Probe(size_bytes)


class _Probe:
    """One probe being answered; a `base.Reception`."""

    buffers: Sequence[Buffer] = ()

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes

    def commit(self) -> Reply:
        return Reply(b"", [memoryview(bytearray(self._size_bytes))])

    def abandon(self) -> None:
        """The memory is nobody's."""


def fastest_s(link: PeerLink, deadline_s: float) -> float:
    """Of some transfers of `PROBE_BYTES` from the peer, until they are verified. Raises KvasirError."""
    header, into = msgspec.msgpack.encode(PROBE_BYTES), [memoryview(bytearray(PROBE_BYTES))]
    until_s = time.monotonic() + deadline_s
    took_s = []
    for _ in range(_ROUNDS):
        began_s = time.monotonic()
        link.ask(KIND, header, into=into, deadline_s=max(0.001, until_s - began_s))
        took_s.append(time.monotonic() - began_s)
    return min(took_s[1:])


_log = logging.getLogger("kvasir.worker.bulk")
_CLOSE_S = 5.0

Issue = Callable[[], Awaitable[bytes]]
"""Asks the peer for a ticket, over the bus. Raises KvasirError."""


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where another worker listens, as its ticket says."""

    peer: Peer
    host: str
    addresses: Mapping[str, str]
    """Of its bulk listeners, by transport."""


class Plane:
    """One worker's listeners, and its way of dialling others."""

    def __init__(
        self, own: Peer, host: str, transports: Sequence[BulkTransport], clock: Clock = monotonic_s
    ) -> None:
        self.own = own
        self.desk = WorkerDesk(own, clock=clock)
        self.desk.serve(KIND, Probes())
        self.choice = TransportChoice([transport.name for transport in transports], host)
        self._clock = clock
        self._transports = {transport.name: transport for transport in transports}
        self._listeners: dict[str, SocketListener] = {}
        self.addresses: Mapping[str, str] = {}
        """Of the listeners, by transport; what a heartbeat announces."""

    def open(self) -> None:
        """Listens. Raises ConfigError when a transport cannot."""
        try:
            for name, transport in self._transports.items():
                self._listeners[name] = transport.listen(self.desk)
        except ConfigError:
            self.close()
            raise
        self.addresses = {name: listener.address for name, listener in self._listeners.items()}

    async def connect(self, to: PeerAddress, issue: Issue, *, deadline_s: float) -> PeerLink:
        """A new link to that worker, by the best transport that can be dialled, each tried once.

        Raises NoResponder when there is none, else what the last one tried raised; Unauthorized and
        StaleEpoch at once."""
        worker_id = to.peer.worker_id
        until_s = self._clock() + deadline_s
        if self.choice.needs_comparison(worker_id, self._clock()):
            await self._compare(to, issue, deadline_s / 2)
        names = self.choice.ranking(worker_id, to.addresses, to.host, self._clock())
        failure: KvasirError = NoResponder(f"no bulk transport leads to worker {worker_id}")
        for place, name in enumerate(names):
            share_s = max(0.001, (until_s - self._clock()) / (len(names) - place))
            try:
                return await self._dial(to, name, issue, share_s)
            except (Unauthorized, StaleEpoch):
                raise
            except KvasirError as error:
                failure = error
                self.choice.on_failure(worker_id, name, self._clock())
                _log.warning("no link to %s by %s: %s", worker_id, name, error)
        raise failure

    async def measure(self, link: PeerLink, *, deadline_s: float) -> None:
        """How fast bytes come by this link, for all who read `choice.rates`. Raises KvasirError; whoever
        stops waiting has no link any more."""
        try:
            took_s = await asyncio.to_thread(fastest_s, link, deadline_s)
        except asyncio.CancelledError:
            link.close()  # The thread is in the middle of a call: whoever is next needs another link.
            raise
        self.choice.rates.link(link.peer.worker_id, link.transport).on_carried(PROBE_BYTES, took_s)

    async def _compare(self, to: PeerAddress, issue: Issue, deadline_s: float) -> None:
        """Measures every transport that leads there, where there is a choice at all. Raises Unauthorized and
        StaleEpoch."""
        worker_id = to.peer.worker_id
        names = self.choice.ranking(worker_id, to.addresses, to.host, self._clock())
        share_s = deadline_s / max(1, len(names))
        for name in names if len(names) > 1 else ():
            link: PeerLink | None = None
            try:
                link = await self._dial(to, name, issue, share_s)
                await self.measure(link, deadline_s=share_s)
            except (Unauthorized, StaleEpoch):
                raise
            except KvasirError as error:
                self.choice.on_failure(worker_id, name, self._clock())
                _log.info("%s to %s was not measured: %s", name, worker_id, error)
            finally:
                if link is not None:
                    link.close()
        self.choice.on_compared(worker_id, self._clock())

    async def _dial(self, to: PeerAddress, name: str, issue: Issue, deadline_s: float) -> PeerLink:
        ticket = await issue()
        dial = self._transports[name].dial
        dialling = asyncio.ensure_future(
            asyncio.to_thread(dial, to.addresses[name], self.own, to.peer, ticket, deadline_s=deadline_s)
        )
        try:
            return await asyncio.shield(dialling)
        except asyncio.CancelledError:
            dialling.add_done_callback(_close_late)
            raise
        except ValueError as error:  # Of an address or a ticket: the peer's own words.
            raise InvalidMessage(f"{to.peer.worker_id} cannot be dialled as it says: {error}") from error

    def close(self) -> bool:
        """Closes all listeners; links that were dialled are their owners'. False when one took too long."""
        closed = [listener.close(_CLOSE_S) for listener in self._listeners.values()]
        self._listeners, self.addresses = {}, {}
        return all(closed)


def _close_late(dialled: "asyncio.Future[PeerLink]") -> None:
    """A link that is there when nobody waits for it any more."""
    if not dialled.cancelled() and dialled.exception() is None:
        dialled.result().close()
