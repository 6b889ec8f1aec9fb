"""A world in place of the system below the services: clocks, threads, chance, bus, sockets, the disk's calls.

Nothing of the services is replaced; only what they import from outside.
"""

import concurrent.futures._base as futures
import contextlib
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import services.gateway.service as gateway_service
import services.worker.door as door
import services.worker.engine.simulated as simulated
import services.worker.engine_thread as engine_thread
import services.worker.kv.store as store
import services.worker.kv.tiers.copier as copier
import services.worker.kv.tiers.disk as disk
import services.worker.kv.tiers.host as peer_tier
import services.worker.kv.transfers as transfers
import services.worker.peers.attention.creditor as creditor
import services.worker.peers.keeping.loans as cache_loans
import services.worker.peers.keeping.loans as keeper
import services.worker.peers.keeping.loans as ways
import services.worker.peers.lending.service as lending
import services.worker.peers.transport.pipe as pipe
import services.worker.peers.transport.server as bulk_server
import services.worker.peers.transport.tcp as tcp
import services.worker.service as worker_service
import shared.bus.connection as bus_connection
import shared.bus.departures as departures
import shared.bus.link as link
import shared.bus.server_choice as server_choice
from services.gateway.text.tokenizer import Codec, load_codec
from shared.bus.express import Express
from tests.simulation import threads
from tests.simulation.bulk import Sockets
from tests.simulation.disk import Disks
from tests.simulation.http import VirtualListener, VirtualServer
from tests.simulation.nats_client import ExpressSocket, VirtualClient, server_info
from tests.simulation.world import World

_ENGINE = (engine_thread, transfers, disk, simulated, futures)
_THREADED = (*_ENGINE, peer_tier, bulk_server, pipe, lending, creditor, keeper, ways)
_TIMED = {
    transfers: ("monotonic", "perf_counter"),
    copier: ("monotonic", "perf_counter"),
    store: ("monotonic",),
    ways: ("perf_counter",),
}
_COPY_S = (0.0, 0.0002, 0.002, 0.01)
_DISK_BYTES = 16 * 1024
"""What a world takes for a MiB of disk: blocks of simulated KV are small."""
_CACHE_RESTS_S, _CACHE_IDLE_S = 0.4, 1.0
"""Of loans for prefix caches: a world lasts for some seconds."""
_codecs: dict[str, Codec] = {}


@contextlib.contextmanager
def inhabited(world: World, sockets: Sockets, disks: Disks) -> Iterator[None]:
    """What services import is this world's, until the end."""
    monotonic_s, unix_s = _clocks(world)
    chance = random.Random(world.random.random())
    state, interval_s = random.getstate(), sys.getswitchinterval()
    random.seed(chance.random())
    with contextlib.ExitStack() as stack:

        def replace(where: Any, name: str, by: Any) -> None:
            stack.enter_context(patch.object(where, name, by))

        threads.use(world)
        stack.callback(threads.use, None)
        for name in ("monotonic", "perf_counter"):
            replace(time, name, monotonic_s)
        replace(time, "time", unix_s)
        replace(time, "perf_counter_ns", lambda: int(monotonic_s() * 1e9))
        replace(time, "sleep", threads.sleep)
        replace(os, "urandom", chance.randbytes)
        replace(random, "_urandom", chance.randbytes)
        for module in _THREADED:
            replace(module, "threading", threads)
        for module, names in _TIMED.items():
            for name in names:
                replace(module, name, monotonic_s)
        replace(door, "SimpleQueue", threads.SimpleQueue)
        replace(transfers, "PriorityQueue", threads.PriorityQueue)
        replace(transfers, "_be_nice", lambda niceness: None)
        replace(transfers.Ticket, "run", _in_time(world, transfers.Ticket.run))
        replace(simulated.SimulatedEngine, "__init__", _with_sleep(simulated.SimulatedEngine.__init__))
        replace(departures, "_refuses", sockets.refuses)
        replace(link, "FairClient", VirtualClient)
        replace(server_choice, "server_info", server_info)
        replace(bus_connection, "Express", SimpleNamespace(connect=_express))
        for module in (tcp, bulk_server, pipe):
            replace(module, "socket", sockets)
        replace(pipe, "select", sockets)
        replace(worker_service, "socket", sockets)
        replace(store, "_MEGA", _DISK_BYTES)
        replace(cache_loans, "_REST_S", _CACHE_RESTS_S)
        replace(cache_loans, "_IDLE_S", _CACHE_IDLE_S)
        replace(disk, "os", disks.os)
        replace(disk, "fcntl", disks.fcntl)
        replace(gateway_service, "bind", VirtualListener)
        replace(gateway_service, "url_of", lambda listener: "http://gateway")
        replace(gateway_service, "make_server", VirtualServer)
        replace(gateway_service, "make_operator_server", VirtualServer)
        replace(gateway_service, "load_codec", _load_codec)
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            random.setstate(state)
            sys.setswitchinterval(interval_s)
            if was_on:
                gc.enable()


def _clocks(world: World) -> tuple[Callable[[], float], Callable[[], float]]:
    """Of whoever runs."""

    def monotonic_s() -> float:
        strand = world.strand
        return world.now_s if strand is None else world.now_s + strand.process.clock_ahead_s

    def unix_s() -> float:
        strand = world.strand
        return world.now_s if strand is None else strand.process.unix_s()

    return monotonic_s, unix_s


def _in_time(world: World, run: Any) -> Any:
    """A copy takes a while, and others do something meanwhile; where copies hang, it is in its middle."""

    def slowly(self: Any, **options: Any) -> Any:
        threads.sleep(world.random.choice(_COPY_S))
        copy = self._copy

        def hanging() -> Any:
            me = threads.strand()
            stands_s = me.process.copies_stand_until_s - world.now_s
            if stands_s > 0:
                me.wait(stands_s)
            return copy()

        self._copy = hanging
        return run(self, **options)

    return slowly


def _with_sleep(init: Any) -> Any:
    """A simulated engine's steps pass on the world's time."""

    def made(self: Any, **options: Any) -> None:
        init(self, **{"sleep": threads.sleep, **options})

    return made


def _express(config: Any, name: str, counters: Any) -> Express:
    connection = ExpressSocket(threads.strand().process, name, config.url)
    return Express(connection, config, config.max_payload_bytes, counters)  # type: ignore[arg-type]


def _load_codec(model: str) -> Codec:
    """Reading it takes a second: once is enough."""
    if model not in _codecs:
        _codecs[model] = load_codec(model)
    return _codecs[model]
