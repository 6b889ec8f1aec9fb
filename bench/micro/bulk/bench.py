"""`python -m bench bulk`: GB/s of each bulk transport against a bare socket and memcpy, and round trips.

Two processes on one host. Sides take turns in each round; figures are medians over rounds, ratios medians of
the rounds' ratios. A transfer ends when the receiver has verified it and replied.
"""

import socket
from argparse import ArgumentParser
from collections import defaultdict
from statistics import median, quantiles
from time import perf_counter
from typing import Protocol

import numpy as np

from bench.kit.context import Context
from bench.kit.outcome import Outcome, Table
from bench.kit.processes import Child
from bench.micro.bulk.peer import ANSWERING, ASKING
from services.worker.core.settings import BulkConfig
from services.worker.peers.transport.base import Buffer
from services.worker.peers.transport.plane import make_transports
from services.worker.peers.transport.tcp import split_address
from shared.errors import ConfigError

_DEADLINE_S = 60.0


class Transfer(Protocol):
    """A way to move bytes to another process."""

    def send_s(self, data: Buffer) -> float:
        """Send data; return the seconds until the other process has confirmed it."""
        ...

    def round_trip_s(self, data: Buffer, into: Buffer) -> float | None:
        """Return the seconds of a round trip, or None if the side has none."""
        ...

    def close(self) -> None: ...


class Memcpy:
    """A copy within one process, the upper limit of every transport."""

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
        """Close nothing."""


class _Process(Child):
    """A process of `bench.micro.bulk.peer` for one transport."""

    def __init__(self, name: str) -> None:
        super().__init__("bench.micro.bulk.peer", name)
        said = self.hear()
        self.address, self.ticket = str(said["address"]), bytes.fromhex(said["ticket"])

    def close(self) -> None:
        self.__exit__()


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
    """A transport of the bulk plane, used as workers use it."""

    def __init__(self, name: str) -> None:
        """Raises ConfigError if the transport is not installed."""
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


MIB = 1 << 20
_TRANSPORTS = ("tcp", "shm", "ucx")
_ROUND_TRIP_BYTES = 8192


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--mib", nargs="+", type=int, default=[1, 4, 16, 64, 256], help="sizes [%(default)s]")
    parser.add_argument("--rounds", type=int, default=0, help="[21; with --quick 5]")


def run(context: Context) -> Outcome:
    """Run the bench; missing transports are left out with a note. Raises ConfigError for a size over 256."""
    sizes: list[int] = sorted(set(context.arguments.mib))
    if not 1 <= sizes[0] <= sizes[-1] <= 256:
        raise ConfigError("sizes are from 1 to 256 MiB", param="mib")
    rounds = context.arguments.rounds or (5 if context.quick else 21)
    data = random_bytes(context.seed, sizes[-1] * MIB).data
    sides: dict[str, Transfer] = {}
    notes = ["one direction, verified by the receiver; round trips: 8 KiB there, 8 KiB back"]
    try:
        sides["memcpy"] = Memcpy(data.nbytes)
        sides["bare"] = BareSocket()
        for name in _TRANSPORTS:
            try:
                sides[name] = Linked(name)
            except ConfigError as error:
                notes.append(f"{name} left out: {error.message}")
        speeds = _speeds(context, sides, data, sizes, rounds)
        trips_us = {
            name: found for name, side in sides.items() if (found := _round_trips(side, 200 * rounds))
        }
    finally:
        for side in sides.values():
            side.close()
    return _outcome(speeds, trips_us, sizes, notes)


def random_bytes(seed: int, size_bytes: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """Return random data, which cannot be compressed."""
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)


Speeds = dict[tuple[str, int], list[float]]
"""GB/s of each round, by side and MiB."""


def _speeds(
    context: Context, sides: dict[str, Transfer], data: Buffer, sizes: list[int], rounds: int
) -> Speeds:
    found: Speeds = defaultdict(list)
    with context.progress("rounds", rounds) as progress:
        for number in range(rounds + 1):
            for size in sizes:
                for name, side in sides.items():
                    took_s = side.send_s(data[: size * MIB])
                    if number:  # The first round is a warm-up.
                        found[name, size].append(size * MIB / took_s / 1e9)
                        context.record({"side": name, "mib": size, "round": number, "took_s": took_s})
            progress.advance(1 if number else 0)
    return found


def _round_trips(side: Transfer, count: int) -> list[float]:
    """Return sorted microseconds; empty if the side has no round trips."""
    data, into = memoryview(bytearray(_ROUND_TRIP_BYTES)), memoryview(bytearray(_ROUND_TRIP_BYTES))
    found = [took_s * 1e6 for _ in range(count) if (took_s := side.round_trip_s(data, into)) is not None]
    return sorted(found)


def _outcome(speeds: Speeds, trips_us: dict[str, list[float]], sizes: list[int], notes: list[str]) -> Outcome:
    names = list(dict.fromkeys(name for name, _ in speeds))
    figures: dict[str, float] = {}
    for name in names:
        by_size = {size: median(speeds[name, size]) for size in sizes}
        figures[f"{name}_gb_s"] = by_size[sizes[-1]]
        figures |= {f"{name}_gb_s_{size}mib": speed for size, speed in by_size.items()}
    if "tcp" in names:
        ratios = [
            median(tcp / bare for tcp, bare in zip(speeds["tcp", size], speeds["bare", size], strict=True))
            for size in sizes
        ]
        figures["tcp_vs_limit"] = ratios[-1]
        figures |= {f"tcp_vs_limit_{size}mib": ratio for size, ratio in zip(sizes, ratios, strict=True)}
    for name, trips in trips_us.items():
        figures[f"{name}_round_trip_us_p50"] = median(trips)
        figures[f"{name}_round_trip_us_p99"] = quantiles(trips, n=100)[98]
    table = [(size, *(figures[f"{name}_gb_s_{size}mib"] for name in names)) for size in sizes]
    trip_rows = [
        (name, figures[f"{name}_round_trip_us_p50"], figures[f"{name}_round_trip_us_p99"])
        for name in trips_us
    ]
    return Outcome(
        figures,
        0,
        [
            Table("GB/s", ("MiB", *names), table),
            Table("8 KiB there and back, µs", ("transport", "p50", "p99"), trip_rows),
        ],
        notes,
    )
