"""A worker on a real nats-server announces its bulk plane and lets another worker in with a ticket."""

import asyncio
from pathlib import Path

import pytest

from services.worker.assembly import make_engine
from services.worker.config import WorkerConfig
from services.worker.peers.transport.base import Peer
from services.worker.peers.transport.plane import PeerAddress, Plane
from services.worker.peers.transport.tcp import TcpTransport
from services.worker.service import Worker
from shared import subjects
from shared.bus import Listener
from shared.errors import InvalidRequest
from shared.messages.lending import AskTicket, BulkTicket
from shared.messages.reports import WorkerReported
from tests.conftest import ConnectBus


class Heard:
    def __init__(self) -> None:
        self.addresses: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()

    def on_reported(self, reported: WorkerReported) -> None:
        if not self.addresses.done():
            self.addresses.set_result(reported.bulk_addresses)


async def test_a_worker_announces_where_it_listens_and_issues_tickets(
    connect_bus: ConnectBus, model_folder: Path
) -> None:
    asker = await connect_bus("worker", "worker-1")
    heard = Heard()
    await asker.attach([Listener(subjects.ANY_WORKER_REPORTED, WorkerReported, "on_reported")], heard)
    bus = await connect_bus("worker", "worker-0")
    config = WorkerConfig(model=str(model_folder), kv_blocks=16, heartbeat_s=0.05)
    serving = asyncio.create_task(Worker(bus, config, make_engine(config)).serve())
    addresses = await asyncio.wait_for(heard.addresses, 20.0)
    assert set(addresses) == {"shm", "tcp"}
    own = Peer("worker-1", asker.incarnation)
    question = AskTicket(worker_id=own.worker_id, incarnation=own.incarnation)
    subject = subjects.worker_dial("worker-0", "worker-1")

    async def issue() -> bytes:
        return (await asker.request(subject, question, BulkTicket, deadline_s=10.0)).ticket

    there = PeerAddress(Peer("worker-0", bus.incarnation), "elsewhere", addresses)
    link = await Plane(own, "here", [TcpTransport()]).connect(there, issue, deadline_s=10.0)
    assert link.transport == "tcp"
    with pytest.raises(InvalidRequest, match="nowhere"):
        await asyncio.to_thread(link.ask, "nowhere", deadline_s=10.0)
    link.close()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
