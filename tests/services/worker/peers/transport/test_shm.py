"""Rings whose memory could vanish are refused: touching it would kill the process. Addresses of listeners."""

import fcntl
import os
import socket

import pytest

from services.worker.peers.transport.base import Peer
from services.worker.peers.transport.plane import WorkerDesk
from services.worker.peers.transport.shm import Rings, ShmTransport
from services.worker.peers.transport.tcp import split_address
from shared.errors import InvalidMessage, InvalidRequest, NoResponder

_RING_BYTES = 4 << 20


@pytest.mark.parametrize(
    ("size", "seals"), [(_RING_BYTES, 0), (4096, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)]
)
def test_a_file_that_can_shrink_or_is_short_is_no_ring(size: int, seals: int) -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(InvalidMessage):
        Rings(fd, fd, ours)
    os.close(fd)


def test_who_brings_no_rings_is_turned_away() -> None:
    desk = WorkerDesk(Peer("own", 1))
    listener = ShmTransport().listen(desk)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5.0)
        sock.connect("\0" + listener.address[1:])
        sock.sendall(b"x")
        assert sock.recv(1) == b""
    assert listener.close(5.0)


def test_addresses_that_lead_nowhere() -> None:
    with pytest.raises(InvalidRequest):
        ShmTransport().dial("127.0.0.1:1", Peer("a", 1), Peer("b", 1), b"", deadline_s=1.0)
    with pytest.raises(NoResponder):
        ShmTransport().dial("@nobody", Peer("a", 1), Peer("b", 1), b"", deadline_s=1.0)


def test_hosts_and_ports() -> None:
    assert split_address("10.0.0.3:7100") == ("10.0.0.3", 7100)
    assert split_address("[::1]:7100") == ("::1", 7100)


@pytest.mark.parametrize("address", ["", "host", ":80", "host:", "host:x", "host:99999", "@name"])
def test_what_is_none(address: str) -> None:
    with pytest.raises(InvalidRequest):
        split_address(address)
