"""Envelopes, digests, tickets, and listeners against malformed messages sent over a plain socket."""

import contextlib
import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.peers.transport import wire
from services.worker.peers.transport.base import Peer, TransportLimits
from services.worker.peers.transport.digest import (
    SLICE_BYTES,
    PayloadDigest,
    digest,
    sizes_as_slices,
    slices,
    sums_in_numpy,
)
from services.worker.peers.transport.server import WorkerDesk
from services.worker.peers.transport.shm import Rings, ShmTransport
from services.worker.peers.transport.tcp import TcpTransport, split_address
from shared.errors import (
    InvalidMessage,
    InvalidRequest,
    MessageTooLarge,
    NoResponder,
    Overloaded,
    Unauthorized,
    to_wire,
)
from tests.patience import wait_until
from tests.services.worker.peers.transport.receivers import End, pattern

OWN, PEER = Peer("own", 1), Peer("peer", 1)
SIZE = 20_000


def heard(sock: socket.socket) -> wire.Envelope:
    limits = TransportLimits()
    length, crc = wire.envelope_bytes(sock.recv(wire.PREFIX.size, socket.MSG_WAITALL), limits)
    return wire.unpacked(sock.recv(length, socket.MSG_WAITALL), crc, limits)


def greeting(ticket: bytes, challenge: bytes) -> bytes:
    proof = wire.greeting_proof(ticket, challenge)
    hello = wire.Hello(PEER.worker_id, 1, OWN.worker_id, 1, wire.ticket_name(ticket), proof)
    return wire.packed(wire.Envelope(wire.HELLO, 0, wire.to_bytes(hello)))


class Rig(End):
    def __init__(self) -> None:
        super().__init__(TcpTransport(), OWN)

    def greeted(self) -> socket.socket:
        """Return a socket connected to the listener."""
        sock = socket.create_connection(split_address(self.listener.address), timeout=5.0)
        sock.sendall(greeting(self.ticket(PEER), heard(sock).header))
        assert heard(sock).type == wire.WELCOME
        return sock


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    assert made.listener.close(5.0)


def _message(data: memoryview) -> bytearray:
    head = wire.packed(wire.Envelope(wire.REQUEST, 1, b"", "keep", (data.nbytes,), 5000))
    return bytearray(head + bytes(data) + digest([data]))


def test_a_handmade_message_is_accepted(rig: Rig) -> None:
    with rig.greeted() as sock:
        sock.sendall(_message(pattern(SIZE)))
        assert b"kept" in sock.recv(4096)
    assert rig.counts.buffers == [pattern(SIZE)]


def assert_nothing_was_taken(rig: Rig) -> None:
    wait_until(lambda: not rig.listener.links)
    assert rig.counts.committed == 0
    assert rig.counts.abandoned == rig.counts.admitted


@pytest.mark.parametrize("kept", [1, 15, 40, 100, SIZE, -9, -1])
def test_a_truncated_message_is_refused(rig: Rig, kept: int) -> None:
    with rig.greeted() as sock:
        sock.sendall(_message(pattern(SIZE))[:kept])
    assert_nothing_was_taken(rig)


@pytest.mark.parametrize("place", [0, 5, 9, 20, 30, 100, SIZE // 2, SIZE, -1, -8])
def test_a_changed_message_is_refused(rig: Rig, place: int) -> None:
    message = _message(pattern(SIZE))
    message[place] ^= 0x10
    with rig.greeted() as sock:
        sock.sendall(message)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            continue
    assert_nothing_was_taken(rig)


@pytest.mark.parametrize("greeting", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"KVB2" + b"\xff" * 100])
def test_a_greeting_without_a_ticket_is_refused(rig: Rig, greeting: bytes) -> None:
    with socket.create_connection(split_address(rig.listener.address), timeout=8.0) as sock:
        sock.sendall(greeting)
        with contextlib.suppress(OSError):  # It may have been shown the door already.
            sock.shutdown(socket.SHUT_WR)
        wait_until(lambda: not rig.listener.links)
    assert rig.counts.admitted == 0


def test_a_greeting_is_valid_on_its_own_link_only(rig: Rig) -> None:
    """A process that copies a greeting cannot use it first, and never sees the ticket."""
    address, ticket = split_address(rig.listener.address), rig.desk.issue(PEER, valid_for_s=5.0)
    with socket.create_connection(address, timeout=5.0) as one, socket.create_connection(address) as other:
        seen = greeting(ticket, heard(one).header)
        assert ticket not in seen
        heard(other)
        other.sendall(seen)
        refused = heard(other)
    assert refused.type == wire.FAILURE
    assert isinstance(wire.error_from(refused.header), Unauthorized)


def test_a_link_without_a_thread_is_dropped_and_later_ones_are_served(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if "link" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    with socket.create_connection(split_address(rig.listener.address), timeout=5.0) as sock:
        assert sock.recv(1) == b"", "closed at once"
    monkeypatch.undo()
    wait_until(lambda: "can't start new thread" in caplog.text)
    assert not rig.listener.links
    with rig.greeted() as sock:
        sock.sendall(_message(pattern(SIZE)))
        assert b"kept" in sock.recv(4096)


def test_connections_without_a_ticket_do_not_displace_links(rig: Rig) -> None:
    """A peer with a ticket is served at once, however many silent connections there are."""
    address, over = split_address(rig.listener.address), threading.Event()
    silent = [socket.create_connection(address, timeout=5.0) for _ in range(200)]

    def flood() -> None:
        while not over.wait(0.001):
            silent.append(socket.create_connection(address, timeout=5.0))

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        for _ in range(5):
            began_s = time.monotonic()
            with rig.greeted() as sock:
                sock.sendall(_message(pattern(SIZE)))
                assert b"kept" in sock.recv(4096)
            assert time.monotonic() - began_s < 1.5, "sooner than a stranger's time is up"
    finally:
        over.set()
        flooding.join()
        for one in silent:
            one.close()
    assert rig.counts.committed == 5


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


def test_a_link_without_rings_is_refused() -> None:
    desk = WorkerDesk(Peer("own", 1))
    listener = ShmTransport().listen(desk)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5.0)
        sock.connect("\0" + listener.address[1:])
        sock.sendall(b"x")
        assert sock.recv(1) == b""
    assert listener.close(5.0)


def test_dialling_an_unused_address_fails() -> None:
    with pytest.raises(InvalidRequest):
        ShmTransport().dial("127.0.0.1:1", Peer("a", 1), Peer("b", 1), b"", deadline_s=1.0)
    with pytest.raises(NoResponder):
        ShmTransport().dial("@nobody", Peer("a", 1), Peer("b", 1), b"", deadline_s=1.0)


def test_hosts_and_ports() -> None:
    assert split_address("10.0.0.3:7100") == ("10.0.0.3", 7100)
    assert split_address("[::1]:7100") == ("::1", 7100)
    for address in ("", "host", ":80", "host:", "host:x", "host:99999", "@name"):
        with pytest.raises(InvalidRequest):
            split_address(address)


def test_tickets_expire_and_are_bounded_for_each_peer() -> None:
    now_s = 0.0
    desk = WorkerDesk(OWN, clock=lambda: now_s)
    late = desk.issue(PEER, valid_for_s=5.0)
    with pytest.raises(Overloaded):
        for _ in range(5000):
            desk.issue(PEER, valid_for_s=5.0)
    desk.issue(Peer("b", 1), valid_for_s=5.0)
    now_s = 5.0
    with pytest.raises(Unauthorized):
        desk.enter(PEER, wire.ticket_name(late))
    ticket = desk.issue(PEER, valid_for_s=5.0)
    desk.issue(Peer(PEER.worker_id, 2), valid_for_s=5.0)
    with pytest.raises(Unauthorized):
        desk.enter(PEER, wire.ticket_name(ticket))
    with pytest.raises(Unauthorized):
        desk.issue(PEER, valid_for_s=5.0)


# --- envelopes

LIMITS = TransportLimits(header_bytes=100, buffers=4, message_bytes=1000)


def _read(data: bytes) -> wire.Envelope:
    length, crc = wire.envelope_bytes(data[: wire.PREFIX.size], LIMITS)
    body = data[wire.PREFIX.size : wire.PREFIX.size + length]
    if len(body) < length:
        raise InvalidMessage("a reader waits for the rest")
    return wire.unpacked(body, crc, LIMITS)


@given(
    st.builds(
        wire.Envelope,
        st.integers(0, 5),
        st.integers(0, 2**63),
        st.binary(max_size=100),
        st.text(max_size=10),
        st.lists(st.integers(0, 250), max_size=4).map(tuple),
        st.integers(0, 2**32),
    )
)
def test_a_packed_envelope_is_read_back(envelope: wire.Envelope) -> None:
    assert _read(wire.packed(envelope)) == envelope


@given(st.integers(0, 200), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_in_the_spare_word(place: int, flip: int) -> None:
    data = bytearray(wire.packed(wire.Envelope(wire.REQUEST, 1, b"header", "kind", (1, 2), 100)))
    place %= len(data)
    data[place] ^= flip
    if 12 <= place < 16:
        _read(bytes(data))
    else:
        with pytest.raises((InvalidMessage, MessageTooLarge)):
            _read(bytes(data))


@pytest.mark.parametrize(
    ("header", "sizes"), [(bytes(101), ()), (b"", (1, 1, 1, 1, 1)), (b"", (600, 600)), (b"", (-1,))]
)
def test_messages_above_the_limits_are_refused(header: bytes, sizes: tuple[int, ...]) -> None:
    with pytest.raises((MessageTooLarge, InvalidMessage)):
        _read(wire.packed(wire.Envelope(wire.REQUEST, 1, header, "kind", sizes)))


def test_errors_keep_their_type() -> None:
    error = wire.error_from(wire.to_bytes(to_wire(Overloaded("later", retry_after_s=2.0))))
    assert isinstance(error, Overloaded) and error.retry_after_s == 2.0
    with pytest.raises(InvalidMessage):
        wire.error_from(b"\xc1")


_ROW = 4096
_LARGE = np.random.default_rng(5).integers(0, 256, 3 * SLICE_BYTES + 12_345, dtype=np.uint8)


def _of(array: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> bytes:
    return digest([array.data])


def _swap(array: "np.ndarray[tuple[int], np.dtype[np.uint8]]", one: int, other: int, size: int) -> None:
    kept = array[one : one + size].copy()
    array[one : one + size] = array[other : other + size]
    array[other : other + size] = kept


FAULTS: dict[str, Callable[["np.ndarray[tuple[int], np.dtype[np.uint8]]"], object]] = {
    "a page of zeros": lambda a: a[_ROW : 2 * _ROW].fill(0),
    "a page twice": lambda a: np.copyto(a[_ROW : 2 * _ROW], a[:_ROW]),
    "two pages swapped": lambda a: _swap(a, 0, 7 * _ROW, _ROW),
    "two words swapped in one row": lambda a: _swap(a, 16, 800, 8),
    "two slices swapped": lambda a: _swap(a, 0, SLICE_BYTES, SLICE_BYTES),
    "two bytes exchanged": lambda a: _swap(a, 10, 11, 1),
    "one bit in the rest": lambda a: a.__setitem__(-1, a[-1] ^ 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_shows(fault: str) -> None:
    broken = _LARGE.copy()
    FAULTS[fault](broken)
    assert not np.array_equal(broken, _LARGE)
    assert _of(broken) != _of(_LARGE)


@given(st.integers(0, _LARGE.size - 1), st.integers(1, 255))
def test_shows_any_single_byte(place: int, flip: int) -> None:
    broken = _LARGE.copy()
    broken[place] ^= flip
    assert _of(broken) != _of(_LARGE)


@pytest.mark.parametrize("bit", range(64))
def test_shows_every_bit_of_a_word_wherever_it_is(bit: int) -> None:
    for word in (0, 511, 512, 1250, 2000, 131_071, 131_072):
        broken = _LARGE.copy()
        broken[8 * word + bit // 8] ^= 1 << bit % 8
        assert _of(broken) != _of(_LARGE)


@given(st.binary(max_size=100), st.integers(0, 99), st.integers(1, 255))
def test_shows_any_byte_of_a_short_payload(data: bytes, place: int, flip: int) -> None:
    broken = bytearray(data)
    if place < len(broken):
        broken[place] ^= flip
        assert digest([memoryview(data)]) != digest([memoryview(broken)])


@given(st.lists(st.integers(0, 3 * SLICE_BYTES // 2), max_size=5))
def test_buffers_and_sizes_are_cut_alike(sizes: list[int]) -> None:
    buffers = [memoryview(bytes(size)) for size in sizes]
    scratch = memoryview(bytearray(SLICE_BYTES))
    cut = [[view.nbytes for view in group] for group in slices(buffers)]
    assert cut == [[view.nbytes for view in group] for group in sizes_as_slices(sizes, scratch)]
    assert sum(map(sum, cut)) == sum(sizes)
    assert all(0 < sum(group) <= SLICE_BYTES for group in cut)


@pytest.mark.parametrize("rows", [4, 5, 63, 64])
def test_the_library_and_numpy_agree(rows: int) -> None:
    words = _LARGE[: rows * 8192].view(np.uint64)
    view = words.view(np.uint8).data
    by_row, by_column = sums_in_numpy(words, rows)
    made = PayloadDigest()
    made.update([view])
    other = PayloadDigest()
    with mock.patch("services.worker.peers.transport.digest._sums", return_value=sums_in_numpy):
        other.update([view])
    assert made.value == other.value and by_row != by_column
