"""Planes that find each other over a real bus: a ticket, a link, and what was measured in an earlier life."""

import pytest

from services.worker.peers.attention.plane import HANDLERS, BulkPlane
from services.worker.peers.transport.shm import ShmTransport
from services.worker.peers.transport.tcp import TcpTransport
from shared.errors import NoResponder
from tests.conftest import ConnectBus
from tests.services.ledger.builders import report
from tests.services.worker.peers.transport.receivers import furnish


async def test_dials_by_a_ticket_and_forgets_with_a_new_life(connect_bus: ConnectBus) -> None:
    planes = {}
    buses = {name: await connect_bus("worker", name) for name in ("w0", "w1")}
    try:
        for name, bus in buses.items():
            planes[name] = plane = BulkPlane(bus, "host", [TcpTransport(), ShmTransport()], 5.0)
            furnish(plane._plane.desk)
            plane.open()
            await bus.attach(HANDLERS, plane)
        incarnation = buses["w1"].incarnation
        link = await planes["w0"].dial("w1", incarnation)
        assert link.ask("echo", b"hello", deadline_s=5.0).header == b"hello"
        choice = planes["w0"]._plane.choice
        assert len(choice.gb_per_s) == 2, "both ways were measured"
        planes["w0"].on_transfer(link, 1 << 20, 1.0)
        with pytest.raises(NoResponder):
            await planes["w0"].dial("w1", incarnation - 1)
        planes["w0"].on_reported(report("w1", incarnation=incarnation))
        assert len(choice.gb_per_s) == 2
        planes["w0"].on_reported(report("w1", incarnation=incarnation + 1))
        assert choice.gb_per_s == {}
        link.close()
    finally:
        closed = [plane.close() for plane in planes.values()]
        assert all(closed)
