"""Sockets between workers: what `services.worker.peers.transport` needs of `socket` and `select`.

A connection keeps its bytes in order and loses none; it is slow, stands still while either end is cut off,
and is reset when a process dies.
"""

import asyncio
import socket as real
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from tests.simulation.threads import strand
from tests.simulation.world import A_MOMENT_S, Process, Strand, World

POLLIN, POLLOUT, POLLRDHUP = 1, 4, 0x2000
_LATENCY_S = (0.00005, 0.0004)
_BYTES_PER_S = 1e9


class Sockets:
    """Of one world: stands in for both modules."""

    AF_INET, AF_INET6, SOCK_STREAM = real.AF_INET, real.AF_INET6, real.SOCK_STREAM
    IPPROTO_TCP, TCP_NODELAY = real.IPPROTO_TCP, real.TCP_NODELAY
    SHUT_RD, SHUT_WR, SHUT_RDWR = real.SHUT_RD, real.SHUT_WR, real.SHUT_RDWR
    SOL_SOCKET, SO_LINGER = real.SOL_SOCKET, real.SO_LINGER
    POLLIN, POLLOUT, POLLRDHUP = POLLIN, POLLOUT, POLLRDHUP

    def __init__(self, world: World) -> None:
        self._world = world
        self._listening: dict[int, Listening] = {}
        self._ports = count(20_000)
        self.socket, self.poll = Socket, Poll

    def gethostname(self) -> str:
        return "host"

    def create_server(self, address: tuple[str, int], **_: Any) -> "Listening":
        port = next(self._ports)
        listening = self._listening[port] = Listening(self, strand().process, port)
        return listening

    def create_connection(self, address: tuple[str, int], timeout: float | None = None) -> "Socket":
        me = strand()
        self._pause(me)
        listening = self._listening.get(address[1])
        if listening is None or not listening.is_open or not listening.process.alive:
            raise ConnectionRefusedError(111, "Connection refused")
        ours, theirs = Socket(self, me.process), Socket(self, listening.process)
        ours.peer, theirs.peer = theirs, ours
        listening.offer(theirs)
        return ours

    async def refuses(self, host: str, port: int) -> bool | None:
        """As a process hears that tries a connection and lets go of it. Who is cut off is not heard of."""
        own = strand().process
        await asyncio.sleep(self._world.random.uniform(*_LATENCY_S))
        listening = self._listening.get(port)
        if listening is None:
            return True
        reached_s: float = self._world.bus.apart_until_s(own.name, listening.process.name)
        is_reached = reached_s <= self._world.now_s
        return not (listening.is_open and listening.process.alive) if is_reached else None

    def _pause(self, me: Strand) -> None:
        me.wait(self._world.random.uniform(*_LATENCY_S))

    def due_s(self, one: Process, other: Process, size: int, after_s: float) -> float:
        """When that many bytes are there."""
        begin_s: float = max(self._world.now_s, self._world.bus.apart_until_s(one.name, other.name))
        took_s = self._world.random.uniform(*_LATENCY_S) + size / _BYTES_PER_S * max(
            one.slowness, other.slowness
        )
        return max(after_s + A_MOMENT_S, begin_s + took_s)

    @property
    def world(self) -> World:
        return self._world


class _Waitable:
    """Who waits for it to change is woken when it does."""

    def __init__(self) -> None:
        self.waiting: list[Strand] = []

    def changed(self) -> None:
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            each.wake()


class Socket(_Waitable):
    """One end of a connection."""

    family = real.AF_INET

    def __init__(self, sockets: Sockets, process: Process) -> None:
        super().__init__()
        self._sockets, self.process = sockets, process
        self.peer: Socket | None = None
        self._arrived: deque[bytes] = deque()
        self._at, self._last_s = 0, 0.0
        self.is_open, self.is_reset = True, False
        self.has_ended = False
        """The other end writes no more."""
        self._is_shut = False
        """This end writes no more."""
        process.on_death.append(self._on_death)

    # --- as `socket.socket`

    def setblocking(self, _: bool) -> None:
        pass

    def settimeout(self, _: float | None) -> None:
        pass

    def setsockopt(self, *_: object) -> None:
        pass

    def fileno(self) -> int:
        return 1 if self.is_open else -1

    def sendmsg(self, views: Sequence[Any]) -> int:
        self._check()
        if self._is_shut:
            raise BrokenPipeError(32, "Broken pipe")
        data = b"".join(bytes(view) for view in views)
        self._to_peer(lambda peer: peer._arrived.append(data), len(data))
        return len(data)

    def recv_into(self, view: memoryview) -> int:
        return self._read([view])

    def recvmsg_into(self, views: Sequence[memoryview]) -> tuple[int]:
        return (self._read(views),)

    def shutdown(self, how: int) -> None:
        self._check()
        if how == real.SHUT_RDWR:
            self.has_ended = True
            self.changed()
        if not self._is_shut:
            self._is_shut = True
            self._to_peer(lambda peer: setattr(peer, "has_ended", True), 0)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.changed()
            self._to_peer(lambda peer: peer.reset(), 0)

    # --- the wire

    def reset(self) -> None:
        self.is_reset = self.has_ended = True
        self._arrived.clear()

    def has_data(self) -> bool:
        return bool(self._arrived)

    def _to_peer(self, act: Callable[["Socket"], object], size: int) -> None:
        peer = self.peer
        if peer is None:
            return
        self._last_s = self._sockets.due_s(self.process, peer.process, size, self._last_s)

        def arrive() -> None:
            if peer.is_open and peer.process.alive:
                act(peer)
                peer.changed()

        self._sockets.world.at(self._last_s, arrive)

    def _on_death(self) -> None:
        if self.is_open:
            self.is_open = False
            self._to_peer(lambda peer: peer.reset(), 0)

    def _check(self) -> None:
        if not self.is_open:
            raise OSError(9, "Bad file descriptor")
        if self.is_reset:
            raise ConnectionResetError(104, "Connection reset by peer")

    def _read(self, views: Sequence[memoryview]) -> int:
        self._check()
        if not self._arrived:
            if self.has_ended:
                return 0
            raise BlockingIOError
        got = 0
        for view in views:
            filled = 0
            while filled < len(view) and self._arrived:
                first = self._arrived[0]
                size = min(len(view) - filled, len(first) - self._at)
                view[filled : filled + size] = first[self._at : self._at + size]
                filled += size
                self._at += size
                if self._at == len(first):
                    self._arrived.popleft()
                    self._at = 0
            got += filled
        return got


class Listening(_Waitable):
    """A listening socket."""

    def __init__(self, sockets: Sockets, process: Process, port: int) -> None:
        super().__init__()
        self._sockets, self.process, self._port = sockets, process, port
        self.is_open = True
        self._offered: deque[Socket] = deque()
        self._timeout_s: float | None = None

    def getsockname(self) -> tuple[str, int]:
        return ("127.0.0.1", self._port)

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def offer(self, theirs: Socket) -> None:
        self._offered.append(theirs)
        self.changed()

    def accept(self) -> tuple[Socket, None]:
        if not self._offered and self.is_open:
            me = strand()
            self.waiting.append(me)
            me.wait(None)
        if not self.is_open:
            raise OSError(9, "Bad file descriptor")
        if not self._offered:
            raise TimeoutError
        return self._offered.popleft(), None

    def shutdown(self, _: int) -> None:
        self.close()

    def close(self) -> None:
        self.is_open = False
        self.changed()


class Poll:
    """`select.poll` of one socket."""

    def __init__(self) -> None:
        self._socket: Socket | None = None
        self._events = 0

    def register(self, socket: Socket, events: int) -> None:
        self._socket, self._events = socket, events

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        socket = self._socket
        assert socket is not None
        if self._is_ready(socket):
            return [(socket.fileno(), self._events)]
        if timeout_ms <= 0:
            return []
        me, world = strand(), socket._sockets.world
        end_s = world.now_s + timeout_ms / 1e3
        while not self._is_ready(socket) and world.now_s < end_s:
            socket.waiting.append(me)
            if not me.wait(end_s - world.now_s) and me in socket.waiting:
                socket.waiting.remove(me)
        return [(socket.fileno(), self._events)] if self._is_ready(socket) else []

    def _is_ready(self, socket: Socket) -> bool:
        if not socket.is_open or socket.is_reset:
            return True
        if self._events & POLLIN:
            return socket.has_data() or socket.has_ended
        if self._events & POLLRDHUP:
            return socket.has_ended
        return True
