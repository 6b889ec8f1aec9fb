"""Two hosts with nats-servers lose each other, and reach a third: clients move to its server. Real servers in
network namespaces."""

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from shared.bus import Bus
from shared.config import BusConfig
from shared.errors import KvasirError
from shared.server_info import server_info
from tests.nats_server import nats_server_binary
from tests.patience import BUSY_S, PATIENCE_S, until
from tests.shared.bus.desk import ASK, ASK_ENDPOINT, NOTE_LISTENER, NOTED, Answer, Desk, Note, Question
from tests.stack.hosts import Fleet, Host, obstacle

_CLONE_NEWNET = 0x40000000
MOVED_S = 2.0


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    if why := obstacle():
        pytest.skip(why)
    fleet = Fleet(tmp_path, ((), (), ()), {})
    try:
        fleet.connect()
        routes = ", ".join(f'"nats://{host.address}:6222"' for host in fleet.hosts)
        for host in fleet.hosts:
            config = host.folder / "nats.conf"
            config.write_text(
                f'server_name: "{host.name}"\nlisten: "{host.address}:4222"\ncluster {{\n  name: "test"\n'
                f'  listen: "{host.address}:6222"\n  routes: [{routes}]\n  ping_interval: "250ms"\n'
                "  ping_max: 2\n}\n"
            )
            host.start("nats", [nats_server_binary(), "-c", str(config)], {})
        yield fleet.hosts
    finally:
        fleet.stop()


class Process(threading.Thread):
    """Runs `work` in the network of a host, as a process there would."""

    def __init__(self, host: Host, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        super().__init__(daemon=True)
        self._host, self._work = host, work
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with Path(f"/var/run/netns/{self._host.name}").open("rb") as namespace:
                assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) == 0
            asyncio.run(self._work())
        except BaseException as error:
            self.error = error

    def finish(self) -> None:
        self.join(PATIENCE_S)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error


async def connected(hosts: list[Host], at: int) -> Bus:
    """Return the bus of a process on that host, whose own server comes first, once the cluster is whole."""
    urls = [f"nats://{host.address}:4222" for host in hosts]
    config = BusConfig(url=",".join([*urls[at:], *urls[:at]]))
    async with asyncio.timeout(PATIENCE_S):
        for url in urls:
            while len(await told_by(url)) < len(hosts):
                await asyncio.sleep(0.1)
    return await Bus.connect(config, service="desk", instance=f"desk-{at}", registry=CollectorRegistry())


async def told_by(url: str) -> list[str]:
    try:
        return list((await server_info(url, None)).get("connect_urls") or ())
    except OSError:
        return []


async def test_clients_move_to_a_server_that_reaches_more_and_back(hosts: list[Host]) -> None:
    desk, is_over = Desk(), threading.Event()
    took_s: list[float] = []

    def part(*, is_in_reach: bool) -> None:
        hosts[1].reach(hosts[2], is_in_reach=is_in_reach)
        hosts[2].reach(hosts[1], is_in_reach=is_in_reach)

    async def serve() -> None:
        bus = await connected(hosts, 1)
        await bus.attach((ASK_ENDPOINT, NOTE_LISTENER), desk)
        while not is_over.is_set():
            await asyncio.sleep(0.02)
        await bus.close()

    async def answered(bus: Bus) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    await bus.request(ASK, Question(), Answer, deadline_s=0.3)
                    return
                except KvasirError:
                    await asyncio.sleep(0.02)

    async def ask() -> None:
        bus = await connected(hosts, 2)
        await answered(bus)
        part(is_in_reach=False)
        began_s = time.monotonic()
        await answered(bus)
        took_s.append(time.monotonic() - began_s)
        await until(lambda: bus._link.url == f"nats://{hosts[0].address}:4222")  # the other may move first
        for number in range(100):
            await bus.publish(NOTED, Note(number=number))
        await bus.request(ASK, Question(), Answer, deadline_s=PATIENCE_S)
        part(is_in_reach=True)
        await until(lambda: bus._link.url == f"nats://{hosts[2].address}:4222")
        await answered(bus)
        await bus.close()

    serving, asking = Process(hosts[1], serve), Process(hosts[2], ask)
    await asyncio.to_thread(asking.finish)
    is_over.set()
    await asyncio.to_thread(serving.finish)
    assert set(desk.noted) == set(range(100))  # some come twice, over both connections
    assert took_s[0] < MOVED_S + BUSY_S
