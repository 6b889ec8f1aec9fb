"""A link's speed, measured with bytes that nobody needs."""

import pytest

from services.worker.peers.transport.base import Peer
from services.worker.peers.transport.plane import KIND, PROBE_BYTES, Probes, fastest_s
from services.worker.peers.transport.tcp import TcpTransport
from services.worker.peers.transport.tickets import WorkerDesk
from shared.errors import MessageTooLarge

A, B = Peer("worker-a", 1), Peer("worker-b", 1)


def test_transfers_are_timed_and_larger_ones_refused() -> None:
    desk = WorkerDesk(B)
    desk.serve(KIND, Probes())
    listener = TcpTransport().listen(desk)
    link = TcpTransport().dial(listener.address, A, B, desk.issue(A, valid_for_s=5.0), deadline_s=5.0)
    try:
        assert 0 < fastest_s(link, 10.0) < 10
        with pytest.raises(MessageTooLarge):
            link.ask(KIND, b"", [memoryview(bytearray(PROBE_BYTES + 1))], deadline_s=5.0)
    finally:
        link.close()
        assert listener.close(5.0)
