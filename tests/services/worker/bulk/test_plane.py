"""Planes that connect by the transport that suits both ends, with tickets, and fall back."""

from collections.abc import Iterator

import pytest

from services.worker.bulk.base import Peer
from services.worker.bulk.plane import Issue, Neighbour, Plane
from services.worker.bulk.shm import ShmTransport
from services.worker.bulk.tcp import TcpTransport
from shared.errors import ConfigError, NoResponder, StaleEpoch, Unauthorized
from tests.services.worker.bulk.receivers import furnish

A, B = Peer("worker-a", 1), Peer("worker-b", 1)


@pytest.fixture
def a() -> Iterator[Plane]:
    plane = Plane(A, "host-1", [TcpTransport(), ShmTransport()])
    plane.open()
    yield plane
    assert plane.close()


@pytest.fixture
def b() -> Iterator[Plane]:
    plane = Plane(B, "host-1", [TcpTransport(), ShmTransport()])
    plane.open()
    furnish(plane.desk)
    yield plane
    assert plane.close()


def _issue(plane: Plane, peer: Peer = A) -> Issue:
    async def issue() -> bytes:
        return plane.desk.issue(peer, valid_for_s=5.0)

    return issue


@pytest.mark.parametrize(("host", "transport"), [("host-1", "shm"), ("host-2", "tcp")])
async def test_connects_by_what_suits_the_hosts(a: Plane, b: Plane, host: str, transport: str) -> None:
    a.choice.on_compared("worker-b", float("inf"))
    link = await a.connect(Neighbour(B, host, b.addresses), _issue(b), deadline_s=5.0)
    assert link.transport == transport
    assert link.ask("echo", b"hello", deadline_s=5.0).header == b"hello"
    link.close()


async def test_falls_back_to_another_transport_and_remembers(a: Plane, b: Plane) -> None:
    addresses = {**b.addresses, "shm": "@nobody-listens-here"}
    link = await a.connect(Neighbour(B, "host-1", addresses), _issue(b), deadline_s=5.0)
    assert link.transport == "tcp"
    assert a.choice.ranking(
        "worker-b", addresses, "host-1", a.choice.aside_until_s["worker-b", "shm"] - 1
    ) == ["tcp"]
    link.close()


async def test_measures_where_there_is_a_choice_once_and_anew_for_a_new_life(a: Plane, b: Plane) -> None:
    to = Neighbour(B, "host-1", b.addresses)
    (await a.connect(to, _issue(b), deadline_s=5.0)).close()
    assert {transport for _, transport in a.choice.gb_per_s} == {"tcp", "shm"}
    a.choice.gb_per_s["worker-b", "tcp"] = 1e3
    link = await a.connect(to, _issue(b), deadline_s=5.0)
    assert (link.transport, a.choice.gb_per_s["worker-b", "tcp"]) == ("tcp", 1e3), "no second comparison"
    a.on_transfer(link, 1 << 20, 1.0)
    assert a.choice.gb_per_s["worker-b", "tcp"] < 1e3
    link.close()
    a.choice.on_lost("worker-b")
    link = await a.connect(to, _issue(b), deadline_s=5.0)
    assert 0 < a.choice.gb_per_s["worker-b", "tcp"] < 100
    link.close()


async def test_one_way_only_is_not_measured(a: Plane, b: Plane) -> None:
    link = await a.connect(Neighbour(B, "host-2", b.addresses), _issue(b), deadline_s=5.0)
    assert a.choice.gb_per_s == {}
    link.close()


async def test_says_why_there_is_no_link(a: Plane, b: Plane) -> None:
    with pytest.raises(NoResponder):
        await a.connect(Neighbour(B, "host-2", {}), _issue(b), deadline_s=5.0)
    with pytest.raises(NoResponder):
        await a.connect(Neighbour(B, "host-2", {"tcp": "127.0.0.1:1"}), _issue(b), deadline_s=5.0)
    with pytest.raises(Unauthorized):
        other = _issue(b, Peer("worker-c", 1))
        await a.connect(Neighbour(B, "host-1", b.addresses), other, deadline_s=5.0)
    with pytest.raises(StaleEpoch):
        earlier = Peer("worker-b", 0)
        await a.connect(Neighbour(earlier, "host-1", b.addresses), _issue(b), deadline_s=5.0)


def test_a_port_that_is_taken_is_a_setting_to_change(a: Plane) -> None:
    port = int(a.addresses["tcp"].rpartition(":")[2])
    with pytest.raises(ConfigError, match=str(port)):
        Plane(B, "host-1", [ShmTransport(), TcpTransport(port=port)]).open()
