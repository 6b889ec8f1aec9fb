"""Receivers for tests: they echo, keep, supply, refuse, fail or take their time, and count what happened."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.worker.peers.transport.base import Buffer, Peer, Reply
from services.worker.peers.transport.server import WorkerDesk
from shared.errors import InvalidRequest


@dataclass
class Counts:
    """Counters of a desk from `furnish`, written by the threads of links."""

    admitted: int = 0
    committed: int = 0
    abandoned: int = 0
    done: int = 0
    buffers: list[Buffer] = field(default_factory=list)
    """From the latest message."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str) -> None:
        with self.lock:
            setattr(self, name, getattr(self, name) + 1)


class Taken:
    """A `Reception` that replies with the result of `reply`."""

    def __init__(self, counts: Counts, buffers: list[Buffer], reply: Callable[[list[Buffer]], Reply]) -> None:
        self.buffers = buffers
        self._counts = counts
        self._reply = reply
        counts.add("admitted")
        counts.buffers = buffers

    def commit(self) -> Reply:
        self._counts.add("committed")
        return self._reply(self.buffers)

    def abandon(self) -> None:
        self._counts.add("abandoned")


def furnish(desk: WorkerDesk) -> Counts:
    """Kinds: `echo`, `keep`, `source` (header: sizes), `slow` (header: seconds), `refuse`, `fail`."""
    counts = Counts()

    def serve(kind: str, reply: Callable[[bytes, list[Buffer]], Reply]) -> None:
        def admit(peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> Taken:
            buffers = [memoryview(bytearray(size)) for size in sizes_bytes]
            return Taken(counts, buffers, lambda taken: reply(header, taken))

        desk.serve(kind, admit)

    def refuse(peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> Taken:
        raise InvalidRequest("no room", param="sizes", retry_after_s=0.5)

    def echo(header: bytes, buffers: list[Buffer]) -> Reply:
        return Reply(header, buffers, lambda: counts.add("done"))

    def source(header: bytes, _: list[Buffer]) -> Reply:
        sizes = [int(size) for size in header.split()]
        return Reply(b"", [pattern(size) for size in sizes], lambda: counts.add("done"))

    def slow(header: bytes, _: list[Buffer]) -> Reply:
        time.sleep(float(header))
        return Reply(b"at last")

    def fail(header: bytes, _: list[Buffer]) -> Reply:
        raise RuntimeError("a bug in a receiver")

    serve("echo", echo)
    serve("keep", lambda header, buffers: Reply(b"kept"))
    serve("source", source)
    serve("slow", slow)
    serve("fail", fail)
    desk.serve("refuse", refuse)
    return counts


def pattern(size_bytes: int, seed: int = 1) -> Buffer:
    """Return bytes that differ by position."""
    block = bytes((seed + index * 7 + (index >> 8) * 13) & 0xFF for index in range(min(size_bytes, 65521)))
    return memoryview(bytearray((block * (size_bytes // max(1, len(block)) + 1))[:size_bytes]))
