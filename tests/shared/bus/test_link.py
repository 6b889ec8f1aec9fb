"""Losing the server: killed, frozen, refusing us. Every time everything goes on within seconds of its return,
and work that waits ends with what ended it. TLS: with whom, and with nobody else.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from nats.aio.client import Client
from prometheus_client import CollectorRegistry

from services.stack.authority import make_certificate
from services.stack.obstructions import free_port
from shared import errors
from shared.bus import Bus
from shared.bus.link import Waits, next_attempt, tls_options
from shared.config import BusConfig
from shared.errors import BusUnavailable, ConfigError, PermissionRefused
from tests.conftest import ConnectBus, MakeServer
from tests.nats_server import NatsServer
from tests.patience import PATIENCE_S, until
from tests.shared.bus.desk import (
    ASK,
    ASK_ENDPOINT,
    FILE_LISTENER,
    FILED,
    HANDLERS,
    NOTE_LISTENER,
    NOTED,
    Answer,
    Desk,
    Note,
    Question,
    metric,
)

RESUME_S = 5.0
"""The aim is 2 s; the rest is for a loaded machine."""


async def test_no_server_is_bus_unavailable_after_the_connect_timeout() -> None:
    started_s = time.monotonic()
    config = BusConfig(url=f"nats://127.0.0.1:{free_port()}", connect_timeout_s=0.3)
    with pytest.raises(errors.BusUnavailable, match=r"within 0\.3 s \(last error: .*Errno"):
        await Bus.connect(config, service="desk", instance="desk-0", registry=CollectorRegistry())
    assert time.monotonic() - started_s < 5


async def test_an_attempt_whose_cancellation_is_swallowed_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller may be cancelled a second time, and nats-py would go on for ever."""
    swallowing = asyncio.Event()
    select = Client._select_next_server

    async def swallow(client: Client) -> None:
        swallowing.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.2)
        await select(client)

    monkeypatch.setattr(Client, "_select_next_server", swallow)
    config = BusConfig(url=f"nats://127.0.0.1:{free_port()}", connect_timeout_s=30)
    before = asyncio.all_tasks()
    connecting = asyncio.create_task(Bus.connect(config, service="desk", instance="desk-0"))
    await swallowing.wait()
    while not connecting.done():
        connecting.cancel()
        await asyncio.sleep(0)
    await until(lambda: asyncio.all_tasks() <= before)


async def test_requests_are_answered_while_the_server_takes_a_lost_connection_for_alive(
    connect_bus: ConnectBus,
) -> None:
    """A process that lost its server without a word connects anew. The server notices minutes later."""
    former, present = await connect_bus("desk", "desk-0"), await connect_bus("desk", "desk-0")
    for bus in (former, present):
        await bus.attach([ASK_ENDPOINT], Desk())
    transport: Any = former._link.client._transport
    transport._io_writer.transport.pause_reading()
    try:
        caller = await connect_bus()
        for number in range(12):
            asked = caller.request(ASK, Question(number=number), Answer, deadline_s=PATIENCE_S / 4)
            assert (await asked).number == number
    finally:
        transport._io_writer.transport.resume_reading()


async def test_a_server_that_comes_up_late_is_waited_for(make_server: MakeServer) -> None:
    server = make_server(jetstream=False)
    server.port = free_port()
    config = BusConfig(url=server.url, connect_timeout_s=PATIENCE_S)
    connecting = asyncio.create_task(
        Bus.connect(config, service="desk", instance="desk-0", registry=CollectorRegistry())
    )
    await asyncio.sleep(0.1)
    server.start()
    bus = await connecting
    assert bus.connected
    await bus.close()


async def test_wrong_password_is_named(make_server: MakeServer) -> None:
    server = make_server(jetstream=False, extra_config='authorization { user: "u", password: "p" }').start()
    config = BusConfig(url=server.url, user="u", password="no", connect_timeout_s=0.5)  # type: ignore[arg-type]
    with pytest.raises(
        errors.BusUnavailable, match="no NATS connection to"
    ):  # the reason may be cut off by the server
        await Bus.connect(config, service="desk", instance="desk-0", registry=CollectorRegistry())


async def killed_and_restarted(config: BusConfig, server: NatsServer) -> None:
    """A desk, a caller, a SIGKILL between them, and everything as before."""
    registry = CollectorRegistry()
    desk = Desk()
    bus = await Bus.connect(config, service="desk", instance="desk-0", registry=registry)
    caller = await Bus.connect(config, service="tester", instance="tester-0", registry=CollectorRegistry())
    await bus.attach(HANDLERS, desk)
    lease = await bus.acquire_lease("clerk", ttl_s=5)
    desk.gate.clear()
    asking = asyncio.create_task(caller.request(ASK, Question(), Answer, deadline_s=60))
    await until(lambda: desk.running == 1)

    server.kill()
    with pytest.raises(errors.BusUnavailable, match="lost while waiting"):  # at once, not after 60 s
        await asking
    desk.gate.set()
    assert not caller.connected
    with pytest.raises(errors.BusUnavailable, match="not connected"):
        await caller.request(ASK, Question(), Answer, deadline_s=0.05)
    await caller.publish(NOTED, Note(number=1))  # buffered
    server.start()

    started_s = time.monotonic()
    async with asyncio.timeout(RESUME_S):
        answer = await caller.request(ASK, Question(number=8), Answer, deadline_s=60)
        await until(lambda: bus.connected)
        await caller.publish(NOTED, Note(number=2))
        await caller.publish(FILED, Note(number=3))
        await until(lambda: desk.noted[-1:] == [2] and desk.filed == [3])
        await until(lambda: caller.reconnections == 1)
        await lease.renew()
    assert answer.number == 8 and time.monotonic() - started_s < RESUME_S
    assert metric(registry, "kvasir_bus_reconnects_total") == 1
    await caller.close()
    await bus.close()


def test_a_killed_server_on_uvloop(bus_config: BusConfig, nats_server: NatsServer) -> None:
    run_on_uvloop(lambda: killed_and_restarted(bus_config, nats_server))


def run_on_uvloop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("dies_meanwhile", [False, True])
async def test_who_left_while_the_server_hung_hears_nothing_of_the_next_one(
    connect_bus: ConnectBus, nats_server: NatsServer, dies_meanwhile: bool
) -> None:
    """Its wish to leave went down with the connection, and a new connection renews subscriptions. Nobody
    waits for a server that is dead."""
    bus = await connect_bus("desk", "desk-0", drain_timeout_s=10.0 if dies_meanwhile else 1.0)
    caller = await connect_bus("tester", "tester-0")
    before, after = Desk(), Desk()
    before.gate.clear()  # Whoever asks it waits for ever.
    await bus.attach(HANDLERS, before)
    nats_server.freeze()
    leaving = asyncio.create_task(bus.detach(HANDLERS, before))
    await asyncio.wait([leaving], timeout=0.3 if dies_meanwhile else None)
    nats_server.kill()
    async with asyncio.timeout(5.0):
        await leaving
    await until(lambda: not bus.connected and not caller.connected)
    nats_server.start()
    await until(lambda: bus.connected and caller.connected)
    await bus.attach(HANDLERS, after)
    for number in range(20):
        await caller.request(ASK, Question(number=number), Answer, deadline_s=5)
        await caller.publish(NOTED, Note(number=number))
    await until(lambda: len(after.noted) == 20)
    assert before.noted == [] and before.running == 0


async def test_what_waits_to_be_sent_is_bounded(connect_bus: ConnectBus, nats_server: NatsServer) -> None:
    bus = await connect_bus("desk", "desk-0", outbound_buffer_bytes=20_000)
    desk = Desk()
    await bus.attach([NOTE_LISTENER], desk)
    nats_server.kill()
    await until(lambda: not bus.connected)
    with pytest.raises(errors.BusUnavailable, match="buffer is full"):
        for number in range(100):
            await bus.publish(NOTED, Note(text="x" * 1000, number=number))
    nats_server.start()
    await until(lambda: len(desk.noted) > 10)
    assert desk.noted == list(range(len(desk.noted)))


async def test_a_frozen_server_is_noticed(connect_bus: ConnectBus, nats_server: NatsServer) -> None:
    bus, desk = await connect_bus("desk", "desk-0", ping_interval_s=0.1), Desk()
    await bus.attach(HANDLERS, desk)
    nats_server.freeze()
    with pytest.raises(errors.UnavailableError):
        await bus.request(ASK, Question(), Answer, deadline_s=0.1)
    await until(lambda: not bus.connected)
    nats_server.thaw()
    assert (await bus.request(ASK, Question(number=4), Answer, deadline_s=PATIENCE_S)).number == 4


async def test_when_nats_py_gives_up_the_bus_dials_anew(connect_bus: ConnectBus) -> None:
    """A protocol error makes the server throw the client out, and nats-py close for good."""
    bus, desk = await connect_bus("desk", "desk-0"), Desk()
    await bus.attach(HANDLERS, desk)
    client = bus._link.client
    await bus.publish("kvasir." + "x" * 5000, Note())  # longer than a line of the protocol may be
    await until(lambda: client.is_closed)
    assert (await bus.request(ASK, Question(number=6), Answer, deadline_s=PATIENCE_S)).number == 6
    await bus.publish(NOTED, Note(number=1))
    await until(lambda: desk.noted == [1] and bus.reconnections == 1)
    assert bus._link.client is not client


async def test_revoked_credentials_that_are_restored(make_server: MakeServer) -> None:
    right, wrong = (f'authorization {{ user: "u", password: "{word}" }}' for word in ("p", "q"))
    server = make_server(jetstream=False, extra_config=right).start()
    config = BusConfig(url=server.url, user="u", password="p", connect_timeout_s=0.5)  # type: ignore[arg-type]
    bus = await Bus.connect(config, service="desk", instance="desk-0", registry=CollectorRegistry())
    desk = Desk()
    await bus.attach(HANDLERS, desk)
    server.reload(wrong)
    await until(lambda: not bus.connected)
    await asyncio.sleep(0.7)  # a whole attempt to connect fails
    assert not bus.connected
    server.reload(right)
    assert (await bus.request(ASK, Question(number=6), Answer, deadline_s=PATIENCE_S)).number == 6
    await bus.close()


async def test_closing_while_disconnected_is_quick(connect_bus: ConnectBus, nats_server: NatsServer) -> None:
    bus = await connect_bus("desk", "desk-0")
    await bus.attach(HANDLERS, Desk())
    nats_server.kill()
    await until(lambda: not bus.connected)
    async with asyncio.timeout(PATIENCE_S):
        await bus.close()


async def test_what_nats_py_drops_is_counted(
    connect_bus: ConnectBus, caplog: pytest.LogCaptureFixture
) -> None:
    registry = CollectorRegistry()
    bus = await connect_bus("desk", "desk-0", registry)
    await bus.attach([FILE_LISTENER], Desk())
    subscription = next(sub for sub in bus._link.client._subs.values() if sub.subject == FILED)
    subscription._pending_bytes_limit = 10
    for _ in range(3):
        await bus.publish(FILED, Note(text="longer than ten bytes"))
    await until(lambda: metric(registry, "kvasir_bus_slow_consumer_drops_total", kind="nats") == 3)
    assert caplog.text.count("nats-py dropped a message on kvasir.v1.evt.desk.filed") == 1


async def test_a_cancellation_that_nats_py_swallows_still_arrives(connect_bus: ConnectBus) -> None:
    """nats-py's flush catches CancelledError; a deadline around a publish would then never end it."""
    bus = await connect_bus("desk", "desk-0")
    client: Any = bus._link.client
    swallowed = asyncio.Event()

    async def full_queue(_future: object) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            swallowed.set()
            raise

    client._flush_queue.put, put = full_queue, client._flush_queue.put
    publishing = asyncio.create_task(bus.publish(NOTED, Note()))
    await asyncio.sleep(0.01)
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    client._flush_queue.put = put
    assert swallowed.is_set()


async def test_who_is_cancelled_while_he_attaches_ends(connect_bus: ConnectBus) -> None:
    """A worker that was stopped just as the server confirmed its subscriptions served on for ever."""
    bus = await connect_bus("desk", "desk-0")
    client: Any = bus._link.client
    flushes = asyncio.Event()

    async def flush() -> None:
        flushes.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)

    client.flush, flush_again = flush, client.flush
    attaching = asyncio.create_task(bus.attach([FILE_LISTENER], Desk()))
    await flushes.wait()
    attaching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attaching
    client.flush = flush_again


@pytest.mark.parametrize(
    ("failures", "shortest_s", "longest_s"), [(0, 0.025, 0.075), (1, 0.05, 0.15), (60, 0.25, 0.75)]
)
def test_reconnection_waits_double_with_jitter(failures: int, shortest_s: float, longest_s: float) -> None:
    server = SimpleNamespace(reconnects=failures)
    waits_s = [next_attempt(Client(), [server], {})[1] for _ in range(200)]
    assert all(shortest_s <= wait_s <= longest_s for wait_s in waits_s) and max(waits_s) > 1.5 * min(waits_s)


def encrypted(directory: Path, *, first: bool) -> str:
    make_certificate(directory)
    files = f'cert_file: "{directory / "server.pem"}", key_file: "{directory / "server-key.pem"}"'
    return f"tls {{ {files}, handshake_first: {str(first).lower()} }}"


async def connected(config: BusConfig) -> Bus:
    return await Bus.connect(config, service="desk", instance="desk-0", registry=CollectorRegistry())


@pytest.mark.parametrize("first", [True, False])
async def test_messages_pass_strangers_do_not(make_server: MakeServer, tmp_path: Path, first: bool) -> None:
    server = make_server(jetstream=False, extra_config=encrypted(tmp_path / "tls", first=first)).start()
    url = server.url.replace("nats://", "tls://")
    ca = str(tmp_path / "tls" / "ca.pem")
    bus, desk = await connected(BusConfig(url=url, tls_ca=ca, tls_handshake_first=first)), Desk()
    await bus.attach([FILE_LISTENER], desk)
    await bus.publish(FILED, Note(number=1))
    await until(lambda: desk.filed == [1])
    server.kill()
    await until(lambda: not bus.connected)
    server.start()
    await bus.publish(FILED, Note(number=2))
    await until(lambda: desk.filed == [1, 2])
    await bus.close()
    unknown = BusConfig(url=url, connect_timeout_s=0.5, tls_handshake_first=first)
    with pytest.raises(BusUnavailable, match="certificate verify failed"):
        await connected(unknown)
    make_certificate(tmp_path / "other")
    with pytest.raises(BusUnavailable, match="certificate verify failed"):
        await connected(unknown.model_copy(update={"tls_ca": str(tmp_path / "other" / "ca.pem")}))


async def test_a_server_without_tls_gets_no_password(make_server: MakeServer) -> None:
    server = make_server(jetstream=False).start()
    config = BusConfig(url=server.url.replace("nats://", "tls://"), connect_timeout_s=0.5)
    with pytest.raises(BusUnavailable, match="offers no TLS"):
        await connected(config)


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    assert tls_options(BusConfig()) == {}
    (tmp_path / "text").write_text("no certificate")
    for unusable in (tmp_path / "text", tmp_path / "none"):
        with pytest.raises(ConfigError, match=unusable.name):
            tls_options(BusConfig(tls_ca=str(unusable)))
        with pytest.raises(ConfigError, match=unusable.name):
            tls_options(BusConfig(url="tls://x:1", tls_cert=str(unusable)))


LOST = BusUnavailable("lost")
REFUSED = PermissionRefused("refused")


async def forever() -> None:
    await asyncio.Event().wait()


async def test_a_loss_ends_everything_a_refusal_only_its_publishers() -> None:
    waits = Waits()
    lease = asyncio.create_task(waits.result(forever(), ("$KV.", "$JS.API.")))
    other = asyncio.create_task(waits.result(forever()))
    flush = asyncio.create_task(waits.is_done_within(forever(), 60.0))
    await asyncio.sleep(0)
    waits.fail_publishers("$js.api.stream.info.x", REFUSED)
    with pytest.raises(PermissionRefused):
        await lease
    assert not other.done()
    waits.fail_all(LOST)
    with pytest.raises(BusUnavailable):
        await other
    assert not await flush
    waits.fail_all(LOST)
