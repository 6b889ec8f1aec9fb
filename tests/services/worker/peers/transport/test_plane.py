"""Planes connect by the best common transport, with tickets and fallback."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from services.worker.peers.transport import plane as plane_module
from services.worker.peers.transport.base import Peer
from services.worker.peers.transport.link import SocketLink
from services.worker.peers.transport.plane import (
    KIND,
    PROBE_BYTES,
    Issue,
    PeerAddress,
    Plane,
    answer_probe,
    fastest_s,
)
from services.worker.peers.transport.server import WorkerDesk
from services.worker.peers.transport.shm import ShmTransport
from services.worker.peers.transport.tcp import TcpTransport
from shared.errors import (
    ConfigError,
    InvalidMessage,
    KvasirError,
    MessageTooLarge,
    NoResponder,
    StaleEpoch,
    Unauthorized,
)
from tests.patience import until
from tests.services.worker.peers.transport.receivers import furnish

A, B = Peer("worker-a", 1), Peer("worker-b", 1)


@contextmanager
def opened(peer: Peer) -> Iterator[Plane]:
    plane = Plane(peer, "host-1", [TcpTransport(), ShmTransport()])
    plane.open()
    yield plane
    assert plane.close()


@pytest.fixture
def a() -> Iterator[Plane]:
    with opened(A) as plane:
        yield plane


@pytest.fixture
def b() -> Iterator[Plane]:
    with opened(B) as plane:
        furnish(plane.desk)
        yield plane


def _issue(plane: Plane, peer: Peer = A) -> Issue:
    async def issue() -> bytes:
        return plane.desk.issue(peer, valid_for_s=5.0)

    return issue


@pytest.mark.parametrize(("host", "transport"), [("host-1", "shm"), ("host-2", "tcp")])
async def test_the_transport_suits_the_hosts(a: Plane, b: Plane, host: str, transport: str) -> None:
    a.choice.on_compared("worker-b", float("inf"))
    link = await a.connect(PeerAddress(B, host, b.addresses), _issue(b), deadline_s=5.0)
    assert link.transport == transport
    assert link.ask("echo", b"hello", deadline_s=5.0).header == b"hello"
    link.close()


async def test_falls_back_to_another_transport_and_remembers(a: Plane, b: Plane) -> None:
    addresses = {**b.addresses, "shm": "@nobody-listens-here"}
    link = await a.connect(PeerAddress(B, "host-1", addresses), _issue(b), deadline_s=5.0)
    assert link.transport == "tcp"
    assert a.choice.ranking(
        "worker-b", addresses, "host-1", a.choice.aside_until_s["worker-b", "shm"] - 1
    ) == ["tcp"]
    link.close()


async def test_transports_are_compared_once_per_incarnation(a: Plane, b: Plane) -> None:
    to = PeerAddress(B, "host-1", b.addresses)
    (await a.connect(to, _issue(b), deadline_s=5.0)).close()
    tcp, shm = (a.choice.rates.link("worker-b", name) for name in ("tcp", "shm"))
    assert tcp.bytes_per_s and shm.bytes_per_s
    tcp.bytes_per_s = 1e12
    link = await a.connect(to, _issue(b), deadline_s=5.0)
    assert (link.transport, tcp.bytes_per_s) == ("tcp", 1e12), "no second comparison"
    link.close()
    a.choice.forget("worker-b")
    link = await a.connect(to, _issue(b), deadline_s=5.0)
    assert 0 < (a.choice.rates.link("worker-b", "tcp").bytes_per_s or 0) < 1e11
    link.close()


async def test_a_single_transport_is_measured_on_demand(a: Plane, b: Plane) -> None:
    link = await a.connect(PeerAddress(B, "host-2", b.addresses), _issue(b), deadline_s=5.0)
    assert a.choice.rates.bytes_per_s("worker-b") is None
    await a.measure(link, deadline_s=5.0)
    assert a.choice.rates.link("worker-b", "tcp").bytes_per_s
    link.close()


async def test_a_failed_connect_names_the_cause(a: Plane, b: Plane) -> None:
    with pytest.raises(NoResponder):
        await a.connect(PeerAddress(B, "host-2", {}), _issue(b), deadline_s=5.0)
    with pytest.raises(NoResponder):
        await a.connect(PeerAddress(B, "host-2", {"tcp": "127.0.0.1:1"}), _issue(b), deadline_s=5.0)
    with pytest.raises(Unauthorized):
        other = _issue(b, Peer("worker-c", 1))
        await a.connect(PeerAddress(B, "host-1", b.addresses), other, deadline_s=5.0)
    with pytest.raises(StaleEpoch):
        earlier = Peer("worker-b", 0)
        await a.connect(PeerAddress(earlier, "host-1", b.addresses), _issue(b), deadline_s=5.0)


def test_a_port_in_use_is_a_config_error(a: Plane) -> None:
    port = int(a.addresses["tcp"].rpartition(":")[2])
    with pytest.raises(ConfigError, match=str(port)):
        Plane(B, "host-1", [ShmTransport(), TcpTransport(port=port)]).open()


async def test_a_link_of_a_cancelled_caller_is_closed(a: Plane, b: Plane) -> None:
    """The link stayed open at both ends, and took one of the listener's few places."""
    slow = SlowTransport()
    a._transports["tcp"] = slow
    to = PeerAddress(B, "host-2", b.addresses)
    connecting = asyncio.create_task(a.connect(to, _issue(b), deadline_s=5.0))
    assert await asyncio.to_thread(slow.is_dialling.wait, 5.0)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    slow.may_go_on.set()
    await until(lambda: slow.links and slow.links[0].closed)


async def test_a_cancelled_measurement_closes_its_link(
    a: Plane, b: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread continued on the link while the next fetch used it."""
    link = await a.connect(PeerAddress(B, "host-2", b.addresses), _issue(b), deadline_s=5.0)
    may_go_on = threading.Event()
    monkeypatch.setattr(plane_module, "fastest_s", lambda link, deadline_s: may_go_on.wait(5.0))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await a.measure(link, deadline_s=5.0)
    assert link.closed
    may_go_on.set()


class SlowTransport(TcpTransport):
    """Answers a dial on command."""

    def __init__(self) -> None:
        super().__init__()
        self.is_dialling, self.may_go_on = threading.Event(), threading.Event()
        self.links: list[SocketLink] = []

    def dial(self, address: str, own: Peer, peer: Peer, ticket: bytes, *, deadline_s: float) -> SocketLink:
        self.is_dialling.set()
        assert self.may_go_on.wait(5.0)
        self.links.append(super().dial(address, own, peer, ticket, deadline_s=deadline_s))
        return self.links[0]


@pytest.mark.parametrize(
    "address",
    ["a" * 70 + ":1", "x\0y:1", "nowhere", "h:99999"],
    ids=["too long", "a zero", "no port", "no such port"],
)
async def test_a_malformed_address_is_the_peers_error(a: Plane, b: Plane, address: str) -> None:
    """A malformed ticket of a peer stopped the worker that dialled."""
    with pytest.raises(KvasirError):
        await a.connect(PeerAddress(B, "host-2", {"tcp": address}), _issue(b), deadline_s=5.0)
    with pytest.raises(KvasirError):
        await a.connect(PeerAddress(B, "host-1", {"shm": f"@{address}"}), _issue(b), deadline_s=5.0)


def test_transfers_are_timed_and_larger_ones_refused() -> None:
    desk = WorkerDesk(B)
    desk.serve(KIND, answer_probe)
    listener = TcpTransport().listen(desk)
    link = TcpTransport().dial(listener.address, A, B, desk.issue(A, valid_for_s=5.0), deadline_s=5.0)
    try:
        assert 0 < fastest_s(link, 10.0) < 10
        with pytest.raises(MessageTooLarge):
            link.ask(KIND, msgspec.msgpack.encode(PROBE_BYTES + 1), deadline_s=5.0)
        with pytest.raises(InvalidMessage):
            link.ask(KIND, b"?", deadline_s=5.0)
    finally:
        link.close()
        assert listener.close(5.0)
