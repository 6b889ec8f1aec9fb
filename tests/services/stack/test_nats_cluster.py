"""nats-servers as `up --nats-cluster 3` starts them: leases outlive them, all know departures."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import nats.errors
import pytest
from nats.js.api import StreamInfo
from pydantic import ValidationError

from services.stack import nats_server
from services.stack.access import BusAccess, certificate_for
from services.stack.config import StackConfig
from services.stack.obstructions import Obstructed, choose_nats_ports, free_port
from services.stack.probes import greeting, reaches
from services.stack.process import ChildProcess
from services.stack.rundir import RunDirectory
from shared.bus import Bus, Lease
from shared.config import BusConfig
from shared.errors import UnavailableError
from shared.subjects import LEASE_BUCKET, OPERATOR
from tests.patience import BUSY_S, STACK_PATIENCE_S, until


class Servers:
    def __init__(self, run: RunDirectory, config: StackConfig) -> None:
        ports = [free_port() for _ in range(config.nats_cluster)]
        certificate = certificate_for(config, run.path / "tls")
        self.run, self.access = (run, BusAccess.to(ports, run.credentials(*config.instances), certificate))
        self.names = nats_server.write_configs(run, config, self.access)
        self.processes: dict[str, ChildProcess] = {}
        self.probes = [
            partial(reaches, partial(greeting, own.config(OPERATOR)), len(ports))
            for own in self.access.each()
        ]

    def start(self, *names: str) -> None:
        for name in names:
            argv = [nats_server.binary(), "-c", str(self.run.nats_config(name))]
            log = self.run.path / f"{name}.log"
            self.processes[name] = ChildProcess.start(argv, os.environ, self.run.path, log)

    async def until_whole(self) -> None:
        async with asyncio.timeout(STACK_PATIENCE_S):
            while any([await probe(0.0) for probe in self.probes]):
                await asyncio.sleep(0.05)

    async def kill(self, *names: str) -> None:
        for name in names:
            process = self.processes.pop(name)
            process.kill()
            await process.wait()

    async def bus(self, user: str, server: int | None = None) -> Bus:
        access = self.access if server is None else self.access.each()[server]
        config = access.config(user, connect_timeout_s=STACK_PATIENCE_S)
        return await Bus.connect(config, service=user.partition("-")[0], instance=user)


@asynccontextmanager
async def cluster(folder: Path, *, tls: bool) -> AsyncIterator[Servers]:
    run = RunDirectory(folder)
    run.create()
    servers = Servers(run, StackConfig(nats_cluster=3, schedulers=2, tls=tls))
    try:
        servers.start(*servers.names)
        await servers.until_whole()
        yield servers
    finally:
        await servers.kill(*servers.processes)


async def renewed(lease: Lease) -> None:
    while True:
        try:
            return await lease.renew()
        except UnavailableError:
            await asyncio.sleep(0.1)


async def bucket(bus: Bus) -> StreamInfo:
    """Servers answer only while the bucket has a leader."""
    while True:
        with suppress(nats.errors.TimeoutError):
            return await bus._link.client.jetstream(timeout=0.5).stream_info(f"KV_{LEASE_BUCKET}")


async def leader(bus: Bus) -> str | None:
    """Name of the server that leads the bucket's replicas."""
    async with asyncio.timeout(STACK_PATIENCE_S):
        while not (found := (await bucket(bus)).cluster) or not found.leader:
            await asyncio.sleep(0.1)
    return found.leader


async def all_current(bus: Bus) -> None:
    """Wait for the replicas: a second death before that can leave the bucket without a leader for minutes."""
    while (found := (await bucket(bus)).cluster) is None or not all(
        each.current for each in found.replicas or ()
    ):
        await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True])
async def test_epochs_grow_over_the_deaths_of_all_servers(tmp_path: Path, tls: bool) -> None:
    async with cluster(tmp_path / "run", tls=tls) as servers, asyncio.timeout(STACK_PATIENCE_S):
        bus = await servers.bus("scheduler-0")
        lease = await bus.acquire_lease("scheduler", ttl_s=60.0)
        info = await bucket(bus)
        assert (info.config.num_replicas, info.config.storage) == (3, "file")
        await renewed(lease)
        assert await leader(bus) != bus._link.server_name, "it moves off"
        for name in servers.names:
            await servers.kill(name)
            await until(lambda: bus.connected)
            await renewed(lease)
            servers.start(name)
            await servers.until_whole()
            await all_current(bus)
        last = lease._revision
        await bus.close()
        await servers.kill(*servers.names)
        servers.start(*servers.names)
        await servers.until_whole()
        again = await servers.bus("scheduler-0")
        assert (await again.acquire_lease("scheduler", ttl_s=1.0)).epoch > last
        await again.close()


async def test_the_buckets_leader_stays_where_no_holder_is(tmp_path: Path) -> None:
    """Wherever it is elected."""
    async with cluster(tmp_path / "run", tls=False) as servers, asyncio.timeout(STACK_PATIENCE_S):
        buses = [await servers.bus(name) for name in ("scheduler-0", "scheduler-1")]
        taken = [bus._link.server_name for bus in buses]
        (free,) = {"kvasir-0", "kvasir-1", "kvasir-2"} - set(taken)
        leases = [await buses[0].acquire_lease("scheduler", ttl_s=60.0)]
        leases.append(await buses[1].acquire_lease("scheduler.1", ttl_s=60.0))
        for elected in (*taken, free):
            await all_current(buses[0])
            await buses[0]._link.client.request(
                f"$JS.API.STREAM.LEADER.STEPDOWN.KV_{LEASE_BUCKET}",
                json.dumps({"placement": {"preferred": elected}}).encode(),
            )
            await until_leader(buses[0], elected)
            for lease in leases * 2:
                await renewed(lease)
            await until_leader(buses[0], free)
        for bus in buses:
            await bus.close()


async def until_leader(bus: Bus, name: str) -> None:
    while await leader(bus) != name:
        await asyncio.sleep(0.05)


async def test_departures_are_known_at_every_server(tmp_path: Path) -> None:
    gone: list[tuple[str, int]] = []
    async with cluster(tmp_path / "run", tls=False) as servers, asyncio.timeout(STACK_PATIENCE_S):
        observers = [await servers.bus(f"{name}-0", at) for at, name in enumerate(("gateway", "scheduler"))]
        for bus in observers:
            await bus.watch_departures(lambda *who: gone.append(who))
        leaver = await servers.bus("worker-0")
        first = leaver._link.url
        await asyncio.sleep(0.2)
        at = servers.access.url.split(",").index(first)
        await servers.kill(servers.names[at])
        await until(
            lambda: leaver.connected and leaver._link.url != first and all(b.connected for b in observers)
        )
        await asyncio.sleep(0.5)
        assert gone == [], "it connected to another server in time"
        who = ("worker-0", leaver.incarnation)
        await leaver.close()
        await until(lambda: gone.count(who) == sum(bus.connected for bus in observers), STACK_PATIENCE_S)
        for bus in observers:
            await bus.close()


async def test_a_server_without_its_routes_is_not_ready(tmp_path: Path) -> None:
    async with cluster(tmp_path / "run", tls=True) as servers:
        await servers.kill("nats-0", "nats-2")
        async with asyncio.timeout(STACK_PATIENCE_S):
            while not (said := await servers.probes[1](0.0)):
                await asyncio.sleep(0.05)
        assert "of the 2 other servers: see in its log" in said
        assert await servers.probes[0](0.0) == "does not greet yet"


async def test_a_second_cluster_on_its_ports_is_refused() -> None:
    first = free_port()
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", first + 2)
    async with server:
        with pytest.raises(
            Obstructed, match=f"port {first + 2}, wanted for NATS, is taken by .*--nats-port N"
        ):
            await asyncio.to_thread(choose_nats_ports, first, 3, print)


def test_settings_that_no_cluster_can_have() -> None:
    with pytest.raises(ValidationError, match="write 3 or 5"):
        StackConfig(nats_cluster=4)
    with pytest.raises(ValidationError, match="encrypt all servers of a cluster or none"):
        BusConfig(url="tls://a:4222,nats://b:4222")
    with pytest.raises(ValidationError, match="several as nats://A:4222,nats://B:4222"):
        BusConfig(url="nats://a:4222,b:4222")


@pytest.mark.parametrize("tls", [False, True])
async def test_a_server_that_hangs_is_left_at_once(tmp_path: Path, tls: bool) -> None:
    async with cluster(tmp_path / "run", tls=tls) as servers:
        bus = await servers.bus("worker-0")
        at = servers.access.url.split(",").index(bus._link.url)
        began_s = time.monotonic()
        os.kill(servers.processes[servers.names[at]].pid, signal.SIGSTOP)
        await until(lambda: bus.reconnections == 1, BUSY_S)
        print(f"{time.monotonic() - began_s:.2f} s")
        await bus.close()
