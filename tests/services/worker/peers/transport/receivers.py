"""Receivers for tests: they echo, keep, supply, refuse, fail or take their time, and count what happened."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.worker.peers.transport.base import Buffer, Peer, Reception, Reply, TransportLimits
from services.worker.peers.transport.link import LIMITS, PeerLink
from services.worker.peers.transport.plane import BulkTransport
from services.worker.peers.transport.server import WorkerDesk
from shared.errors import InvalidRequest


@dataclass
class Counts:
    """Counters of a desk from `furnish`, written by the threads of links."""

    admitted: int = 0
    committed: int = 0
    abandoned: int = 0
    buffers: list[Buffer] = field(default_factory=list)
    """From the latest message."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str) -> None:
        with self.lock:
            setattr(self, name, getattr(self, name) + 1)


def furnish(desk: WorkerDesk) -> Counts:
    """Kinds: `echo`, `keep`, `source` (header: sizes), `slow` (header: seconds), `refuse`, `fail`."""
    counts = Counts()

    def serve(kind: str, reply: Callable[[bytes, list[Buffer]], Reply]) -> None:
        def admit(peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> Reception:
            counts.add("admitted")
            counts.buffers = buffers = [memoryview(bytearray(size)) for size in sizes_bytes]

            def commit() -> Reply:
                counts.add("committed")
                return reply(header, buffers)

            return Reception(commit, lambda: counts.add("abandoned"), buffers)

        desk.serve({kind: admit})

    def refuse(peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> Reception:
        raise InvalidRequest("no room", param="sizes", retry_after_s=0.5)

    def slow(header: bytes, _: list[Buffer]) -> Reply:
        time.sleep(float(header))
        return Reply(b"at last")

    def fail(header: bytes, _: list[Buffer]) -> Reply:
        raise RuntimeError("a bug in a receiver")

    serve("echo", Reply)
    serve("keep", lambda header, buffers: Reply(b"kept"))
    serve("source", lambda header, _: Reply(b"", [pattern(int(size)) for size in header.split()]))
    serve("slow", slow)
    serve("fail", fail)
    desk.serve({"refuse": refuse})
    return counts


def pattern(size_bytes: int, seed: int = 1) -> Buffer:
    """Return bytes that differ by position."""
    block = bytes((seed + index * 7 + (index >> 8) * 13) & 0xFF for index in range(min(size_bytes, 65521)))
    return memoryview(bytearray((block * (size_bytes // max(1, len(block)) + 1))[:size_bytes]))


class End:
    """A desk of this process, its listener, and its receivers' counters."""

    def __init__(self, transport: BulkTransport, own: Peer, limits: TransportLimits = LIMITS) -> None:
        self.transport = transport
        self.desk = WorkerDesk(own, limits)
        self.counts = furnish(self.desk)
        self.listener = transport.listen(self.desk)

    def ticket(self, peer: Peer) -> bytes:
        return self.desk.issue(peer, valid_for_s=30.0)

    def enter(self, peer: Peer, own: Peer | None = None, ticket: bytes | None = None) -> PeerLink:
        """Return a link from `peer` to `own`, by a new ticket unless one is given."""
        shown = self.ticket(peer) if ticket is None else ticket
        return self.transport.dial(self.listener.address, peer, own or self.desk.own, shown, deadline_s=5.0)

    def dial_in(self, process: Any) -> None:
        """Let the other process dial this one."""
        ticket, own = self.ticket(process.peer).hex(), self.desk.own
        assert process.ask("dial", self.listener.address, own.worker_id, own.incarnation, ticket) == "ok"
