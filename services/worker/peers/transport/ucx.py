"""Bulk transport by UCX (InfiniBand, RoCE, its own shared memory, or TCP) through ucxx, an optional extra.

A link is a TCP link whose large payloads go through UCX; the rest stays with TCP, because UCX's listener
knows no authentication. Each link has its own UCX worker, matched by a random tag and driven by the thread
that owns the link. Endpoints use error handling, so an abort ends every transfer, even with a stopped peer
(decision 0016); UCX's own shared memory and CMA are not used. CPU memory only. `make setup-ucx` installs it.
"""

import contextlib
import os
import secrets
import select
import struct
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from services.worker.peers.transport import wire
from services.worker.peers.transport.base import Buffer
from services.worker.peers.transport.digest import PayloadDigest, slices
from services.worker.peers.transport.link import LIMITS, Carriage, receive_envelope
from services.worker.peers.transport.pipe import Pipe
from services.worker.peers.transport.tcp import TcpTransport
from shared.clock import monotonic_s
from shared.errors import ConfigError, DeadlineExceeded, InvalidMessage, PeerLost

_WINDOW = 4
"""Slices under way at a time."""
_SPINS = 32
_NAP_MS = 50.0
_ADDRESS = struct.Struct("<QI")
_MOST_ADDRESS_BYTES = 1 << 16
_DEFAULTS = {
    "RNDV_SCHEME": "get_zcopy",
    "TCP_TX_SEG_SIZE": "256k",
    "TCP_RX_SEG_SIZE": "256k",
    "LOG_FILE": "stderr",
    "WARN_UNUSED_ENV_VARS": "n",
}
"""Used where the environment (`UCX_…`) sets nothing."""


@cache
def _ucx() -> tuple[Any, Any, Any]:
    """Return ucxx's core, its array wrapper and this process's context. Raises ConfigError."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(f"UCX_{name}", value)
    try:
        with contextlib.suppress(ImportError):  # UCX may be installed system-wide.
            import_module("libucx").load_library()
        core = import_module("ucxx._lib.libucxx")
        array = import_module("ucxx._lib.arr").Array
    except (ImportError, OSError) as error:
        raise ConfigError(
            "the bulk transport ucx needs ucxx: run `make setup-ucx`", param="bulk.transports"
        ) from error
    return core, array, core.UCXContext({}, feature_flags=(core.Feature.TAG, core.Feature.WAKEUP))


class UcxCarriage(Carriage):
    """Carriage of one link's payloads by UCX."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._worker: Any = None
        self._endpoint: Any = None
        self._tag: Any = None
        self._wake = select.poll()

    def open(self, pipe: Pipe, *, is_dialler: bool, until_s: float) -> None:
        """Exchange the addresses of the UCX workers; the dialler chooses the tag."""
        with self._lock, _typed_errors():
            if is_dialler:
                self._tell_address(pipe, secrets.randbits(63), until_s)
                self._hear_address(pipe, until_s)
            else:
                self._tell_address(pipe, self._hear_address(pipe, until_s), until_s)

    def send(self, pipe: Pipe, buffers: Sequence[Buffer], until_s: float) -> None:
        with self._lock, _typed_errors():
            made = PayloadDigest()
            under_way: deque[list[Any]] = deque()
            for group in slices(buffers):
                under_way.append(self._post(self._endpoint.tag_send, group))
                made.update(group)
                if len(under_way) >= _WINDOW:
                    self._await(pipe, under_way.popleft(), until_s)
            for requests in under_way:
                self._await(pipe, requests, until_s)
            pipe.send([made.packed()], until_s)

    def receive(self, pipe: Pipe, groups: Iterable[list[Buffer]], until_s: float) -> bool:
        with self._lock, _typed_errors():
            made = PayloadDigest()
            under_way: deque[tuple[list[Any], list[Buffer]]] = deque()
            for group in groups:
                under_way.append((self._post(self._endpoint.tag_recv, group), group))
                if len(under_way) >= _WINDOW:
                    self._take(pipe, under_way.popleft(), made, until_s)
            while under_way:
                self._take(pipe, under_way.popleft(), made, until_s)
            return pipe.take(wire.DIGEST_BYTES, until_s) == made.packed()

    def close(self) -> None:
        """Abort all transfers before returning. The pipe must be closed already."""
        with self._lock:
            self._endpoint = None  # Its destructor cancels without waiting for the peer.
            self._worker = None

    def _tell_address(self, pipe: Pipe, tag: int, until_s: float) -> None:
        if self._worker is None:
            self._make_worker(tag)
        address = self._worker.address.tobytes()
        pipe.send([_ADDRESS.pack(tag, len(address)), address], until_s)

    def _hear_address(self, pipe: Pipe, until_s: float) -> int:
        """Receive the peer's address; return the tag that came with it."""
        tag, size = _ADDRESS.unpack(pipe.take(_ADDRESS.size, until_s))
        if size > _MOST_ADDRESS_BYTES:
            raise InvalidMessage("not a UCX address: the peer speaks another protocol")
        if self._worker is None:
            self._make_worker(tag)
        address = _ucx()[0].UCXAddress.create_from_buffer(bytes(pipe.take(size, until_s)))
        self._endpoint = self._worker.create_endpoint_from_worker_address(
            address, endpoint_error_handling=True
        )
        return int(tag)

    def _make_worker(self, tag: int) -> None:
        core, _, context = _ucx()
        self._worker = core.UCXWorker(context)
        self._worker.init_blocking_progress_mode()
        self._wake.register(self._worker.epoll_file_descriptor, select.POLLIN)
        self._tag = core.UCXXTag(tag)

    def _post(self, operation: Any, group: list[Buffer]) -> list[Any]:
        array = _ucx()[1]
        return [operation(array(np.frombuffer(view, np.uint8)), tag=self._tag) for view in group]

    def _take(
        self, pipe: Pipe, received: tuple[list[Any], list[Buffer]], made: PayloadDigest, until_s: float
    ) -> None:
        self._await(pipe, received[0], until_s)
        made.update(received[1])

    def _await(self, pipe: Pipe, requests: list[Any], until_s: float) -> None:
        """Wait for requests. Raises DeadlineExceeded, PeerLost, or the error with which the peer failed."""
        for request in requests:
            while not request.completed:
                self._progress(pipe, request, until_s)
            request.check_error()

    def _progress(self, pipe: Pipe, request: Any, until_s: float) -> None:
        for _ in range(_SPINS):
            self._worker.progress()
            if request.completed:
                return
        left_s = until_s - monotonic_s()
        if left_s <= 0:
            raise DeadlineExceeded("the peer did not take part in a UCX transfer in time")
        if pipe.has_hung_up:
            raise wire.error_from(receive_envelope(pipe, LIMITS, until_s).header)
        if self._worker.arm():
            self._wake.poll(min(left_s * 1e3, _NAP_MS))


@contextlib.contextmanager
def _typed_errors() -> Iterator[None]:
    """Raise PeerLost for any error of UCX."""
    try:
        yield
    except _ucx()[0].UCXError as error:
        raise PeerLost(f"the UCX transfer broke: {error}") from error


class UcxTransport(TcpTransport):
    """Bulk transport by UCX. Addresses are those of TCP."""

    name = "ucx"
    carriage = UcxCarriage

    def __init__(self, bind: str = "127.0.0.1", port: int = 0, advertise: str = "") -> None:
        """As `TcpTransport`. Raises ConfigError where ucxx is not installed."""
        _ucx()
        super().__init__(bind, port, advertise)
