"""Workers dial each other over a real bus: tickets, links, and speeds of earlier incarnations."""

import pytest

from services.worker.peers.registry import HANDLERS, Registry
from services.worker.peers.transport.shm import ShmTransport
from services.worker.peers.transport.tcp import TcpTransport
from shared.errors import NoResponder
from tests.conftest import ConnectBus
from tests.services.ledger.builders import report
from tests.services.worker.peers.transport.receivers import furnish


async def test_a_worker_dials_by_ticket_and_forgets_speeds_on_a_restart(connect_bus: ConnectBus) -> None:
    workers: dict[str, Registry] = {}
    buses = {name: await connect_bus("worker", name) for name in ("w0", "w1")}
    try:
        for name, bus in buses.items():
            workers[name] = registry = Registry(bus, "host", [TcpTransport(), ShmTransport()], 5.0)
            furnish(registry.plane.desk)
            registry.plane.open()
            await bus.attach(HANDLERS, registry)
        here = workers["w0"]
        incarnation = buses["w1"].incarnation
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
    finally:
        closed = [worker.plane.close() for worker in workers.values()]
        assert all(closed)
