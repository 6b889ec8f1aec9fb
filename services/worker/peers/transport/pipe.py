"""A stream socket with a deadline for every operation. Closing aborts it.

It blocks in `poll` only. One thread owns it; other threads may call `close` alone. It reads ahead a little,
so that a small message costs one system call.
"""

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence

from services.worker.peers.transport.base import Buffer
from shared.clock import monotonic_s
from shared.errors import DeadlineExceeded, PeerLost

_AHEAD_BYTES = 32 << 10
_MOST_VIEWS = 512
_RESET = struct.pack("ii", 1, 0)


class Pipe:
    """A socket, which the pipe takes over."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._lock = threading.RLock()
        self.closed = False
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)
        self._hung_up = select.poll()
        self._hung_up.register(sock, select.POLLRDHUP)
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._start = 0
        self._end = 0

    def send(self, views: Sequence["Buffer | bytes"], until_s: float) -> None:
        """Send all views. Raises DeadlineExceeded and PeerLost."""
        with self._lock:
            left = [memoryview(view) for view in views]
            while left:
                self._check()
                try:
                    sent = self.sock.sendmsg(left[:_MOST_VIEWS])
                except BlockingIOError:
                    self._await(self._writable, until_s)
                except OSError as error:
                    raise _broken(error) from error
                else:
                    left = _advance(left, sent)

    def take(self, count: int, until_s: float) -> memoryview:
        """Return the next `count` bytes, valid until the next call. Raises DeadlineExceeded and PeerLost."""
        with self._lock:
            if self._end - self._start < count:
                if count > _AHEAD_BYTES:
                    whole = memoryview(bytearray(count))
                    self._fill([whole], until_s)
                    return whole
                self._read_ahead(count, until_s)
            self._start += count
            return self._ahead[self._start - count : self._start]

    def fill(self, views: Sequence[Buffer], until_s: float) -> None:
        """Fill all views with the next bytes. Raises DeadlineExceeded and PeerLost."""
        with self._lock:
            self._fill(list(views), until_s)

    def wait(self, until_s: float) -> None:
        """Wait until there is something to read. Raises DeadlineExceeded and PeerLost."""
        with self._lock:
            if self._end == self._start:
                self._await(self._readable, until_s)

    def lend(self, use: Callable[[int, memoryview], int]) -> None:
        """Lend the non-blocking descriptor, and the bytes read ahead, to `use`. Raises PeerLost.

        `use` returns how many of the bytes it consumed. A `close` by another thread shuts the socket down,
        which `use` notices."""
        with self._lock:
            self._check()
            self._start += use(self.sock.fileno(), self._ahead[self._start : self._end])

    @property
    def has_hung_up(self) -> bool:
        """Whether the peer closed or aborted. Bytes that it sent before may be unread."""
        with self._lock:
            return self.closed or bool(self._hung_up.poll(0))

    def part(self, until_s: float) -> None:
        """End this side and wait for the peer to end its own, so that a last message arrives."""
        with self._lock, contextlib.suppress(OSError, PeerLost):
            self.sock.shutdown(socket.SHUT_WR)
            while True:
                self._receive([self._ahead], until_s)

    def close(self) -> None:
        """Abort the connection and drop undelivered bytes. Any thread may call it at any time."""
        self.closed = True
        with contextlib.suppress(OSError):  # Disconnected or closed already.
            self.sock.shutdown(socket.SHUT_RDWR)  # Wakes the owner from poll.
        with self._lock:
            if self.sock.fileno() >= 0:
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                self.sock.close()

    def _fill(self, left: list[Buffer], until_s: float) -> None:
        while left and self._start < self._end:
            count = min(left[0].nbytes, self._end - self._start)
            left[0][:count] = self._ahead[self._start : self._start + count]
            self._start += count
            left = _advance(left, count)
        while left:
            left = _advance(left, self._receive(left, until_s))

    def _read_ahead(self, count: int, until_s: float) -> None:
        if self._start:
            rest = bytes(self._ahead[self._start : self._end])
            self._ahead[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        while self._end < count:
            self._end += self._receive([self._ahead[self._end :]], until_s)

    def _receive(self, views: list[Buffer], until_s: float) -> int:
        """Read at least one byte into the leading views; return how many."""
        while True:
            self._check()
            try:
                if len(views) == 1:
                    got = self.sock.recv_into(views[0])
                else:
                    got = self.sock.recvmsg_into(views[:_MOST_VIEWS])[0]
            except BlockingIOError:
                self._await(self._readable, until_s)
                continue
            except OSError as error:
                raise _broken(error) from error
            if not got:
                raise PeerLost("the peer closed the link")
            return got

    def _check(self) -> None:
        if self.closed:
            raise PeerLost("the link was closed")

    def _await(self, poll: "select.poll", until_s: float) -> None:
        self._check()
        left_s = until_s - monotonic_s()
        if left_s <= 0 or not poll.poll(left_s * 1e3):
            raise DeadlineExceeded("the peer did not answer on the bulk plane in time")


def _broken(error: OSError) -> PeerLost:
    return PeerLost(f"the link to the peer broke: {error.strerror}")


def _advance(left: list[Buffer], count: int) -> list[Buffer]:
    """Return what is left of the views after `count` bytes."""
    index = 0
    while index < len(left) and count >= left[index].nbytes:
        count -= left[index].nbytes
        index += 1
    left = left[index:]
    if count:
        left[0] = left[0][count:]
    return left
