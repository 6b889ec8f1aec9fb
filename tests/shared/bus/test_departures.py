"""Who leaves the bus is told by the server at once, and who comes back in time has not left."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.bus import Bus
from shared.bus.departures import GRACE_S, BusAdvisory, BusClient, Departures
from tests.patience import PATIENCE_S
from tests.services.stack.secured import secured_server

PROGRAM = """
import asyncio, socket, sys
from shared.bus import Bus
from shared.config import BusConfig

async def main():
    config = BusConfig(url=sys.argv[1], user=sys.argv[2], password=sys.argv[3])
    bus = await Bus.connect(config, service="worker", instance=sys.argv[2])
    door = socket.create_server(("127.0.0.1", 0))
    print(bus.incarnation, door.getsockname()[1], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Heard:
    def __init__(self) -> None:
        self.gone: list[tuple[str, int]] = []
        self.is_told = asyncio.Event()

    def __call__(self, instance: str, incarnation: int) -> None:
        self.gone.append((instance, incarnation))
        self.is_told.set()


def watched() -> tuple[Departures, Heard]:
    departures, heard = Departures(), Heard()
    departures.watch(heard)
    return departures, heard


def event(number: int, run: str = "worker-0/7", user: str = "worker-0") -> BusAdvisory:
    """Of the run's connection of this number."""
    return BusAdvisory(BusClient(user, f"{run}/{number}"))


@contextlib.asynccontextmanager
async def started(
    folder: Path, heard: Heard
) -> AsyncIterator[tuple[Bus, asyncio.subprocess.Process, int, int]]:
    """A process that listens, and who hears when it leaves: its incarnation and its port."""
    async with secured_server(folder / "run") as access, asyncio.timeout(3 * PATIENCE_S):
        config = access.config("scheduler-0", connect_timeout_s=PATIENCE_S)
        bus = await Bus.connect(config, service="scheduler", instance="scheduler-0")
        await bus.watch_departures(heard)
        password = access.credentials.nats_passwords["worker-0"]
        argv = [sys.executable, "-c", PROGRAM, access.url, "worker-0", password]
        process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        incarnation, port = map(int, (await process.stdout.readline()).split())
        yield bus, process, incarnation, port
        await process.wait()
        await bus.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_a_process_that_ends_is_told_of_by_a_stacks_server(tmp_path: Path, how: signal.Signals) -> None:
    heard = Heard()
    async with started(tmp_path, heard) as (bus, process, incarnation, _):
        await asyncio.sleep(2 * GRACE_S)
        assert heard.gone == []
        process.send_signal(how)
        await heard.is_told.wait()
        assert heard.gone == [("worker-0", incarnation)] and bus.departures.is_gone("worker-0", incarnation)
        assert not bus.departures.is_gone("worker-0", incarnation + 1)


async def test_nobody_waits_for_one_whose_port_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.bus.departures.GRACE_S", 10 * PATIENCE_S)
    heard = Heard()
    async with started(tmp_path, heard) as (bus, process, incarnation, port):
        bus.departures.on_listening("worker-0", incarnation, f"127.0.0.1:{port}")
        process.kill()
        await heard.is_told.wait()
        assert heard.gone == [("worker-0", incarnation)]


async def test_one_whose_port_takes_connections_has_not_left() -> None:
    """It may be at another server, and the word of that lost."""
    departures, heard = watched()
    with socket.create_server(("127.0.0.1", 0)) as door:
        departures.on_listening("worker-0", 7, f"127.0.0.1:{door.getsockname()[1]}")
        departures.on_disconnected(event(1))
        await asyncio.sleep(3 * GRACE_S)
        assert heard.gone == [] and not departures.is_gone("worker-0", 7)
        departures.on_disconnected(event(1))
    async with asyncio.timeout(PATIENCE_S):
        await heard.is_told.wait()
    assert heard.gone == [("worker-0", 7)]


async def test_one_whose_port_takes_connections_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.bus.departures.GRACE_S", 10 * PATIENCE_S)
    departures, heard = watched()
    with socket.create_server(("127.0.0.1", 0)) as door:
        departures.on_listening("worker-0", 7, f"127.0.0.1:{door.getsockname()[1]}")
        departures.on_disconnected(event(1))
        door.settimeout(0)
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(3):  # it knocks, and knocks again
                taken, _ = await asyncio.get_running_loop().sock_accept(door)
                taken.close()
        assert heard.gone == []
    async with asyncio.timeout(PATIENCE_S):
        await heard.is_told.wait()
    assert heard.gone == [("worker-0", 7)]


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "nonsense", "127.0.0.1:99999", ""])
async def test_who_is_back_at_once_is_there_whatever_was_said_of_its_port(address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    departures, heard = watched()
    departures.on_listening("worker-0", 7, address.format(port=port))
    departures.on_disconnected(event(1))
    departures.on_connected(event(2))
    await asyncio.sleep(2 * GRACE_S)
    assert heard.gone == []


async def test_the_port_of_its_next_start_says_nothing_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.bus.departures.GRACE_S", 10 * PATIENCE_S)
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    departures, heard = watched()
    departures.on_listening("worker-0", 8, f"127.0.0.1:{port}")
    departures.on_disconnected(event(1))
    await asyncio.sleep(0.1)
    assert heard.gone == []
    departures.close()


async def test_who_may_not_listen_waits_for_silence(tmp_path: Path) -> None:
    async with secured_server(tmp_path / "run") as access:
        config = access.config("predictor-0", connect_timeout_s=PATIENCE_S)
        bus = await Bus.connect(config, service="predictor", instance="predictor-0")
        await bus.watch_departures(Heard())
        await bus.close()


async def test_who_is_back_in_time_has_not_left() -> None:
    departures, heard = watched()
    departures.on_connected(event(1))
    departures.on_disconnected(event(1))
    departures.on_connected(event(2))
    departures.on_disconnected(event(1))
    await asyncio.sleep(2 * GRACE_S)
    assert heard.gone == [] and not departures.is_gone("worker-0", 7)
    departures.on_disconnected(event(2))
    async with asyncio.timeout(PATIENCE_S):
        await heard.is_told.wait()
    assert heard.gone == [("worker-0", 7)] and departures.is_gone("worker-0", 7)
    departures.on_connected(event(3))
    assert not departures.is_gone("worker-0", 7)


async def test_connections_of_a_server_that_was_killed_are_over() -> None:
    """It tells nobody of them. Keeps deaths from being known by silence only, once it was started again."""
    departures, heard = watched()
    departures.on_connected(event(1))
    departures.on_connected(event(1, "worker-1/8", "worker-1"))
    departures.on_connected(event(2))
    departures.on_disconnected(event(2))
    departures.on_disconnected(event(2, "worker-1/8", "worker-1"))
    await asyncio.sleep(2 * GRACE_S)
    assert heard.gone == [("worker-0", 7), ("worker-1", 8)]


async def test_who_is_back_has_not_left_when_a_server_misses_a_former_connection() -> None:
    departures, heard = watched()
    departures.on_connected(event(1))
    departures.on_connected(event(2))
    departures.on_disconnected(event(1))
    await asyncio.sleep(2 * GRACE_S)
    assert heard.gone == [] and not departures.is_gone("worker-0", 7)
    departures.forget()
    departures.on_disconnected(event(2))
    async with asyncio.timeout(PATIENCE_S):
        await heard.is_told.wait()
    departures.forget()
    assert not departures.is_gone("worker-0", 7), "servers met: it may have gone on where nothing was heard"


async def test_a_connection_that_is_nobodys_says_nothing() -> None:
    """Another one of the same process, an operator's tool, and one that bears another's name."""
    departures, heard = watched()
    for name, user in [
        ("worker-0", "worker-0"),
        ("worker-0/7", "worker-0"),
        ("worker-0/7/1", "worker-1"),
        ("worker-0/x/1", "worker-0"),
        ("worker-0/" + "9" * 40 + "/1", "worker-0"),
        ("", "worker-0"),
        ("/7/1", ""),
    ]:
        departures.on_disconnected(BusAdvisory(BusClient(user, name)))
    await asyncio.sleep(2 * GRACE_S)
    assert heard.gone == []


async def test_nobody_is_called_after_the_end() -> None:
    departures, heard = watched()
    departures.on_disconnected(event(1))
    departures.close()
    await asyncio.sleep(2 * GRACE_S)
    assert heard.gone == []
