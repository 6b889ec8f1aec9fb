"""A worker's bulk plane: its listeners, its desk, and links to peers by the best transport for each.

Knows neither the bus nor the messages.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from services.worker.core.settings import BulkConfig
from services.worker.peers.core.neighbours import TransportChoice
from services.worker.peers.transport.base import Peer, Reception, Reply
from services.worker.peers.transport.link import PeerLink
from services.worker.peers.transport.server import SocketListener, WorkerDesk
from services.worker.peers.transport.shm import ShmTransport
from services.worker.peers.transport.tcp import TcpTransport
from services.worker.peers.transport.ucx import UcxTransport
from shared.clock import monotonic_s
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
"""The first only fills caches and windows."""
_log = logging.getLogger("kvasir.worker.bulk")
_CLOSE_S = 5.0

BulkTransport = TcpTransport | ShmTransport
Issue = Callable[[], Awaitable[bytes]]
"""Asks the peer for a ticket over the bus. Raises KvasirError."""


def make_transports(config: BulkConfig) -> list[BulkTransport]:
    """Return the configured transports. Raises ConfigError for `ucx` without ucxx."""
    makers: dict[str, Callable[[], BulkTransport]] = {
        "tcp": lambda: TcpTransport(config.bind, config.port, config.advertise),
        "shm": ShmTransport,
        "ucx": lambda: UcxTransport(config.bind, 0, config.advertise),
    }
    return [makers[name]() for name in dict.fromkeys(config.transports)]


def answer_probe(peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> Reception:
    """Receiver that sends as many arbitrary bytes as the header asks for."""
    size_bytes = decode(header, int)
    if sizes_bytes:
        raise InvalidMessage("a probe carries no buffers")
    if not 0 < size_bytes <= PROBE_BYTES:
        raise MessageTooLarge(f"a probe asks for at most {PROBE_BYTES} bytes")
    return Reception(lambda: Reply(b"", [memoryview(bytearray(size_bytes))]))


def fastest_s(link: PeerLink, deadline_s: float) -> float:
    """Return the shortest time of some transfers of `PROBE_BYTES` from the peer. Raises KvasirError."""
    header, into = msgspec.msgpack.encode(PROBE_BYTES), [memoryview(bytearray(PROBE_BYTES))]
    until_s = time.monotonic() + deadline_s
    took_s = []
    for _ in range(_ROUNDS):
        began_s = time.monotonic()
        link.ask(KIND, header, into=into, deadline_s=max(0.001, until_s - began_s))
        took_s.append(time.monotonic() - began_s)
    return min(took_s[1:])


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where another worker listens, from its ticket."""

    peer: Peer
    host: str
    addresses: Mapping[str, str]
    """Its listeners by transport."""


class Plane:
    """A worker's listeners, and its dialler."""

    def __init__(self, own: Peer, host: str, transports: Sequence[BulkTransport]) -> None:
        self.own = own
        self.desk = WorkerDesk(own)
        self.desk.serve({KIND: answer_probe})
        self.choice = TransportChoice([transport.name for transport in transports], host)
        self._transports = {transport.name: transport for transport in transports}
        self._listeners: dict[str, SocketListener] = {}
        self.addresses: Mapping[str, str] = {}
        """Addresses of the listeners by transport, for the heartbeat."""

    def open(self) -> None:
        """Start all listeners. Raises ConfigError when a transport cannot listen."""
        try:
            for name, transport in self._transports.items():
                self._listeners[name] = transport.listen(self.desk)
        except ConfigError:
            self.close()
            raise
        self.addresses = {name: listener.address for name, listener in self._listeners.items()}

    async def connect(self, to: PeerAddress, issue: Issue, *, deadline_s: float) -> PeerLink:
        """Return a new link to a worker, by the best transport that works; each is tried once.

        Raises NoResponder without a common transport, else the error of the last attempt. Unauthorized and
        StaleEpoch end the attempts at once."""
        worker_id = to.peer.worker_id
        until_s = monotonic_s() + deadline_s
        if self.choice.needs_comparison(worker_id, monotonic_s()):
            await self._compare(to, issue, deadline_s / 2)
        names = self._ranking(to)
        failure: KvasirError = NoResponder(f"no bulk transport leads to worker {worker_id}")
        for place, name in enumerate(names):
            share_s = max(0.001, (until_s - monotonic_s()) / (len(names) - place))
            try:
                return await self._dial(to, name, issue, share_s)
            except (Unauthorized, StaleEpoch):
                raise
            except KvasirError as error:
                failure = error
                self.choice.on_failure(worker_id, name, monotonic_s())
                _log.warning("no link to %s by %s: %s", worker_id, name, error)
        raise failure

    async def measure(self, link: PeerLink, *, deadline_s: float) -> None:
        """Measure a link, for `choice.rates`. Raises KvasirError; cancelling closes the link."""
        try:
            took_s = await asyncio.to_thread(fastest_s, link, deadline_s)
        except asyncio.CancelledError:
            link.close()  # The thread is in the middle of a call.
            raise
        self.choice.rates.link(link.peer.worker_id, link.transport).on_carried(PROBE_BYTES, took_s)

    def _ranking(self, to: PeerAddress) -> list[str]:
        return self.choice.ranking(to.peer.worker_id, to.addresses, to.host, monotonic_s())

    async def _compare(self, to: PeerAddress, issue: Issue, deadline_s: float) -> None:
        """Measure the transports that reach the worker, if several do. Raises Unauthorized, StaleEpoch."""
        worker_id, names = to.peer.worker_id, self._ranking(to)
        share_s = deadline_s / max(1, len(names))
        for name in names if len(names) > 1 else ():
            link: PeerLink | None = None
            try:
                link = await self._dial(to, name, issue, share_s)
                await self.measure(link, deadline_s=share_s)
            except (Unauthorized, StaleEpoch):
                raise
            except KvasirError as error:
                self.choice.on_failure(worker_id, name, monotonic_s())
                _log.info("%s to %s was not measured: %s", name, worker_id, error)
            finally:
                if link is not None:
                    link.close()
        self.choice.compared_s[worker_id] = monotonic_s()

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
        except ValueError as error:  # The peer sent a malformed address or ticket.
            raise InvalidMessage(f"{to.peer.worker_id} sent a bad address or ticket: {error}") from error

    def close(self) -> bool:
        """Close all listeners, but no dialled links. False when one took too long."""
        closed = [listener.close(_CLOSE_S) for listener in self._listeners.values()]
        self._listeners, self.addresses = {}, {}
        return all(closed)


def _close_late(dialled: "asyncio.Future[PeerLink]") -> None:
    """Close a link that was dialled after its caller was cancelled."""
    if not dialled.cancelled() and dialled.exception() is None:
        dialled.result().close()
