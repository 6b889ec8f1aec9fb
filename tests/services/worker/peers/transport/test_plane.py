"""Planes connect by the best common transport, with tickets, which registries get by the bus."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest

from services.worker.peers.registry import HANDLERS, Registry
from services.worker.peers.transport import plane as plane_module
from services.worker.peers.transport.base import Peer
from services.worker.peers.transport.link import PeerLink
from services.worker.peers.transport.plane import KIND, PROBE_BYTES, PeerAddress, Plane
from services.worker.peers.transport.shm import ShmTransport
from services.worker.peers.transport.tcp import TcpTransport
from shared import errors
from shared.errors import KvasirError, NoResponder
from tests.conftest import ConnectBus
from tests.patience import until
from tests.services.ledger.builders import report
from tests.services.worker.peers.transport.receivers import furnish

A, B = Peer("worker-a", 1), Peer("worker-b", 1)


class Two:
    """Planes of A and B on `host-1`."""

    def __init__(self) -> None:
        self.a, self.b = (Plane(peer, "host-1", [TcpTransport(), ShmTransport()]) for peer in (A, B))
        furnish(self.b.desk)
        for plane in (self.a, self.b):
            plane.open()
        self.choice = self.a.choice

    async def connect(
        self, host: str = "host-1", addresses: Mapping[str, str] | None = None, own: Peer = A, to: Peer = B
    ) -> PeerLink:
        async def issue() -> bytes:
            return self.b.desk.issue(own, valid_for_s=5.0)

        there = self.b.addresses if addresses is None else addresses
        return await self.a.connect(PeerAddress(to, host, there), issue, deadline_s=5.0)


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two()
    yield made
    assert made.a.close() and made.b.close()


@pytest.mark.parametrize(("host", "transport"), [("host-1", "shm"), ("host-2", "tcp")])
async def test_the_transport_suits_the_hosts(two: Two, host: str, transport: str) -> None:
    two.choice.compared_s["worker-b"] = float("inf")
    link = await two.connect(host)
    assert link.transport == transport
    assert link.ask("echo", b"hello", deadline_s=5.0).header == b"hello"
    link.close()


async def test_falls_back_to_another_transport_and_remembers(two: Two) -> None:
    addresses = {**two.b.addresses, "shm": "@nobody-listens-here"}
    link = await two.connect(addresses=addresses)
    assert link.transport == "tcp"
    until_s = two.choice.aside_until_s["worker-b", "shm"]
    assert two.choice.ranking("worker-b", addresses, "host-1", until_s - 1) == ["tcp"]
    link.close()


async def test_transports_are_compared_once_per_incarnation(two: Two) -> None:
    (await two.connect()).close()
    tcp, shm = (two.choice.rates.link("worker-b", name) for name in ("tcp", "shm"))
    assert tcp.bytes_per_s and shm.bytes_per_s
    tcp.bytes_per_s = 1e12
    link = await two.connect()
    assert (link.transport, tcp.bytes_per_s) == ("tcp", 1e12), "no second comparison"
    link.close()
    two.choice.forget("worker-b")
    (await two.connect()).close()
    assert 0 < (two.choice.rates.link("worker-b", "tcp").bytes_per_s or 0) < 1e11


async def test_a_single_transport_is_measured_on_demand(two: Two) -> None:
    link = await two.connect("host-2")
    assert two.choice.rates.bytes_per_s("worker-b") is None
    await two.a.measure(link, deadline_s=5.0)
    assert two.choice.rates.link("worker-b", "tcp").bytes_per_s
    with pytest.raises(errors.MessageTooLarge):
        link.ask(KIND, msgspec.msgpack.encode(PROBE_BYTES + 1), deadline_s=5.0)
    with pytest.raises(errors.InvalidMessage):
        link.ask(KIND, b"?", deadline_s=5.0)
    link.close()


@pytest.mark.parametrize(
    ("error", "wrong"),
    [
        (NoResponder, {"addresses": {}}),
        (NoResponder, {"addresses": {"tcp": "127.0.0.1:1"}}),
        (errors.Unauthorized, {"own": Peer("worker-c", 1)}),
        (errors.StaleEpoch, {"to": Peer("worker-b", 0)}),
    ],
)
async def test_a_failed_connect_names_the_cause(two: Two, error: type[KvasirError], wrong: Any) -> None:
    with pytest.raises(error):
        await two.connect(**wrong)


@pytest.mark.parametrize("address", ["a" * 70 + ":1", "x\0y:1", "nowhere", "h:99999"])
async def test_a_malformed_address_is_the_peers_error(two: Two, address: str) -> None:
    """A malformed ticket of a peer stopped the worker that dialled."""
    for addresses in ({"tcp": address}, {"shm": f"@{address}"}):
        with pytest.raises(KvasirError):
            await two.connect(addresses=addresses)


def test_a_port_in_use_is_a_config_error(two: Two) -> None:
    port = int(two.a.addresses["tcp"].rpartition(":")[2])
    with pytest.raises(errors.ConfigError, match=str(port)):
        Plane(B, "host-1", [ShmTransport(), TcpTransport(port=port)]).open()


async def test_a_link_of_a_cancelled_caller_is_closed(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link stayed open at both ends, and took one of the listener's few places."""
    is_dialling, may_go_on, links = threading.Event(), threading.Event(), list[PeerLink]()
    dial = TcpTransport.dial

    def slow(*of: Any, **how: Any) -> PeerLink:
        is_dialling.set()
        assert may_go_on.wait(5.0)
        links.append(dial(*of, **how))
        return links[0]

    monkeypatch.setattr(TcpTransport, "dial", slow)
    connecting = asyncio.create_task(two.connect("host-2"))
    assert await asyncio.to_thread(is_dialling.wait, 5.0)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    may_go_on.set()
    await until(lambda: links and links[0].closed)


async def test_a_cancelled_measurement_closes_its_link(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread continued on the link while the next fetch used it."""
    link, may_go_on = await two.connect("host-2"), threading.Event()
    monkeypatch.setattr(plane_module, "fastest_s", lambda link, deadline_s: may_go_on.wait(5.0))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await two.a.measure(link, deadline_s=5.0)
    assert link.closed
    may_go_on.set()


async def test_a_worker_dials_by_ticket_and_forgets_speeds_on_a_restart(connect_bus: ConnectBus) -> None:
    buses = {name: await connect_bus("worker", name) for name in ("w0", "w1")}
    workers = {
        name: Registry(bus, "host", [TcpTransport(), ShmTransport()], 5.0) for name, bus in buses.items()
    }
    for name, registry in workers.items():
        furnish(registry.plane.desk)
        registry.plane.open()
        await buses[name].attach(HANDLERS, registry)
    here, incarnation = workers["w0"], buses["w1"].incarnation
    link = await here.dial("w1", incarnation)
    assert link.ask("echo", b"hello", deadline_s=5.0).header == b"hello"
    assert all(here.rates.link("w1", name).bytes_per_s for name in ("tcp", "shm")), "both were measured"
    with pytest.raises(NoResponder):
        await here.dial("w1", incarnation - 1)
    here.on_reported(report("w1", incarnation=incarnation))
    assert here.rates.bytes_per_s("w1")
    here.on_reported(report("w1", incarnation=incarnation + 1))
    assert here.rates.bytes_per_s("w1") is None
    link.close()
    closed = [worker.plane.close() for worker in workers.values()]
    assert all(closed)
