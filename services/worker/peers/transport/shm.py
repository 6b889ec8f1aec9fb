"""Bulk transport by shared memory, between workers of one host (one network namespace). Linux only.

A link is a Unix socket in the abstract namespace, and one unnamed memory file (memfd) for each direction: a
ring of slices. The sender copies a slice in and sends one byte on the socket. The receiver copies it out,
verifies its copy, and returns the slot by one byte on a second socket. A late write of a peer therefore never
reaches committed memory, and a stopped or killed peer shows as in TCP.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import stat
from collections.abc import Iterable, Sequence

import numpy as np

from services.worker.peers.transport import wire
from services.worker.peers.transport.base import Buffer, Peer
from services.worker.peers.transport.digest import SLICE_BYTES, PayloadDigest, slices
from services.worker.peers.transport.link import Carriage, PeerLink, greet
from services.worker.peers.transport.pipe import Pipe
from services.worker.peers.transport.server import SocketListener, WorkerDesk
from shared.clock import monotonic_s
from shared.errors import DeadlineExceeded, InvalidMessage, InvalidRequest, NoResponder

_SLOTS = 8
_RING_BYTES = _SLOTS * SLICE_BYTES
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_BELL = b"\x01"
_BACKLOG = 64


class Rings(Carriage):
    """Carriage by two rings of slots, one for each direction."""

    def __init__(self, outgoing_fd: int, incoming_fd: int, credits: socket.socket) -> None:
        """Maps both files and takes the socket over. The file descriptors stay the caller's.

        Raises InvalidMessage for a file that is no ring."""
        self._outgoing = _mapped(outgoing_fd)
        self._incoming = _mapped(incoming_fd)
        self._credits = Pipe(credits)

    def send(self, pipe: Pipe, buffers: Sequence[Buffer], until_s: float) -> None:
        made = PayloadDigest()
        sent = 0
        for group in slices(buffers):
            if sent >= _SLOTS:
                self._credits.take(1, until_s)
            slot = self._outgoing[sent % _SLOTS]
            start = 0
            for view in group:
                np.copyto(slot[start : start + view.nbytes], np.frombuffer(view, np.uint8))
                start += view.nbytes
            pipe.send([_BELL], until_s)
            made.update(group)
            sent += 1
        pipe.send([made.packed()], until_s)
        self._credits.take(min(sent, _SLOTS), until_s)

    def receive(self, pipe: Pipe, groups: Iterable[list[Buffer]], until_s: float) -> bool:
        made = PayloadDigest()
        for number, group in enumerate(groups):
            pipe.take(1, until_s)
            slot = self._incoming[number % _SLOTS]
            start = 0
            for view in group:
                np.copyto(np.frombuffer(view, np.uint8), slot[start : start + view.nbytes])
                start += view.nbytes
            self._credits.send([_BELL], until_s)
            made.update(group)
        return pipe.take(wire.DIGEST_BYTES, until_s) == made.packed()

    def close(self) -> None:
        """Close the credits. The kernel frees the memory with its last user."""
        self._credits.close()


class ShmTransport:
    """Bulk transport by shared memory. Addresses are abstract socket names, written with an `@`."""

    name = "shm"

    def listen(self, desk: WorkerDesk) -> SocketListener:
        """Start to serve links."""
        name = f"kvasir-bulk-{secrets.token_hex(8)}"
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(f"\0{name}")
        sock.listen(_BACKLOG)
        return SocketListener(sock, f"@{name}", self.name, desk, _accepted)

    def dial(self, address: str, own: Peer, peer: Peer, ticket: bytes, *, deadline_s: float) -> PeerLink:
        """See `TcpTransport.dial`."""
        if not address.startswith("@"):
            raise InvalidRequest(f"{address!r} is not the address of a shared-memory listener")
        until_s = monotonic_s() + deadline_s
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(deadline_s)
        try:
            sock.connect(f"\0{address[1:]}")
            rings = _pass_rings(sock)
        except TimeoutError as error:
            sock.close()
            raise DeadlineExceeded(f"{address} did not answer within {deadline_s:g} s") from error
        except OSError as error:
            sock.close()
            raise NoResponder(f"nothing answers at {address}: {error.strerror}") from error
        return greet(Pipe(sock), rings, (own, peer), ticket, self.name, until_s)


def _pass_rings(sock: socket.socket) -> Rings:
    """Make rings and credits, and send their other ends. Raises OSError."""
    fds: list[int] = []
    ours, theirs = socket.socketpair()
    try:
        for _ in range(2):
            fds.append(os.memfd_create("kvasir-bulk", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.ftruncate(fds[-1], _RING_BYTES)
            fcntl.fcntl(fds[-1], fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        socket.send_fds(sock, [_BELL], [*fds, theirs.fileno()])
        return Rings(fds[0], fds[1], ours)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        for fd in fds:
            os.close(fd)


def _accepted(sock: socket.socket, until_s: float) -> tuple[Pipe, Carriage]:
    """Take the descriptors over. Raises InvalidMessage, OSError and TimeoutError."""
    sock.settimeout(max(0.001, until_s - monotonic_s()))
    _, fds, _, _ = socket.recv_fds(sock, 1, 3)
    try:
        if len(fds) != 3 or not stat.S_ISSOCK(os.fstat(fds[2]).st_mode):
            raise InvalidMessage("a link by shared memory begins with two memory files and a socket")
        with contextlib.ExitStack() as on_error:
            credits = on_error.enter_context(socket.socket(fileno=os.dup(fds[2])))
            made = Pipe(sock), Rings(fds[1], fds[0], credits)
            on_error.pop_all()
        return made
    finally:
        for fd in fds:
            os.close(fd)


def _mapped(fd: int) -> "list[np.ndarray[tuple[int], np.dtype[np.uint8]]]":
    """Return the slots. The file's size must be sealed: a shrunk file would kill this process (SIGBUS)."""
    if os.fstat(fd).st_size != _RING_BYTES or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise InvalidMessage("this file is no ring: its size is wrong or not sealed")
    memory = np.frombuffer(mmap.mmap(fd, _RING_BYTES), np.uint8)
    return [memory[start : start + SLICE_BYTES] for start in range(0, _RING_BYTES, SLICE_BYTES)]
