"""The asking side of `bench bulk`: one way each to move bytes to another process, timed."""

import json
import socket
import subprocess
import sys
from time import perf_counter
from typing import Protocol

import numpy as np

from bench.kit.provenance import ROOT
from bench.micro.bulk.peer import ANSWERING, ASKING
from services.worker.peers.transport.base import Buffer
from services.worker.peers.transport.settings import BulkConfig, make_transports
from services.worker.peers.transport.tcp import split_address
from shared.errors import InternalError

_DEADLINE_S = 60.0


class Transfer(Protocol):
    """One way."""

    def send_s(self, data: Buffer) -> float:
        """Seconds until the other process has all of it and said so."""
        ...

    def round_trip_s(self, data: Buffer, into: Buffer) -> float | None:
        """Seconds there and back; None where that means nothing."""
        ...

    def close(self) -> None: ...


class Memcpy:
    """What a transport can at most be: a copy within one process."""

    def __init__(self, most_bytes: int) -> None:
        self._target = np.ones(most_bytes, np.uint8)

    def send_s(self, data: Buffer) -> float:
        source = np.frombuffer(data, np.uint8)
        began_s = perf_counter()
        np.copyto(self._target[: source.size], source)
        return perf_counter() - began_s

    def round_trip_s(self, data: Buffer, into: Buffer) -> float | None:
        return None

    def close(self) -> None:
        """Nothing to end."""


class _Process:
    """`bench.micro.bulk.peer` of one transport."""

    def __init__(self, name: str) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "bench.micro.bulk.peer", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        if not line:
            self.close()
            raise InternalError(f"the peer for {name} did not start")
        said = json.loads(line)
        self.address: str = said["address"]
        self.ticket = bytes.fromhex(said["ticket"])

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait()
        for stream in (self._popen.stdin, self._popen.stdout):
            if stream is not None:
                stream.close()


class BareSocket:
    """Loopback TCP without framing, checksum or deadline: the limit of `tcp`."""

    def __init__(self) -> None:
        self._process = _Process("bare")
        self._socket = socket.create_connection(split_address(self._process.address))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send_s(self, data: Buffer) -> float:
        began_s = perf_counter()
        self._socket.sendall(data.nbytes.to_bytes(8, "little"))
        self._socket.sendall(data)
        self._socket.recv(1)
        return perf_counter() - began_s

    def round_trip_s(self, data: Buffer, into: Buffer) -> float | None:
        return None

    def close(self) -> None:
        self._socket.close()
        self._process.close()


class Linked:
    """A transport of the bulk plane, as workers use it."""

    def __init__(self, name: str) -> None:
        """Raises ConfigError where it is not installed."""
        transport = make_transports(BulkConfig(transports=(name,)))[0]  # type: ignore[arg-type]
        self._process = _Process(name)
        self._link = transport.dial(
            self._process.address, ASKING, ANSWERING, self._process.ticket, deadline_s=_DEADLINE_S
        )

    def send_s(self, data: Buffer) -> float:
        began_s = perf_counter()
        self._link.ask("sink", b"", [data], deadline_s=_DEADLINE_S)
        return perf_counter() - began_s

    def round_trip_s(self, data: Buffer, into: Buffer) -> float | None:
        began_s = perf_counter()
        self._link.ask("sink", b"back", [data], into=[into], deadline_s=_DEADLINE_S)
        return perf_counter() - began_s

    def close(self) -> None:
        self._link.close()
        self._process.close()
