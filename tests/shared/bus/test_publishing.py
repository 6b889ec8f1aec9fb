"""Publishing where the server says no, now or later; the express connection; open questions."""

import asyncio
import time

import pytest
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from shared.bus import Bus, Express, Listener, connection
from shared.bus.counters import BusCounters
from shared.config import BusConfig
from shared.errors import BusUnavailable, PermissionRefused
from shared.messages.base import Message
from tests.conftest import ConnectBus, MakeServer
from tests.nats_server import NatsServer
from tests.patience import BUSY_S, PATIENCE_S, until
from tests.shared.bus.desk import (
    ASK,
    ASK_ENDPOINT,
    FILE_LISTENER,
    FILED,
    NOTED,
    Answer,
    Desk,
    Note,
    Question,
    metric,
)

CAPITALS = "kvasir.v1.tok.Gateway-A"


def only(*allowed: str) -> str:
    """A configuration with one user who may publish there and subscribe anywhere."""
    names = ", ".join(f'"{subject}"' for subject in allowed)
    return (
        f'authorization {{ users: [{{ user: "u", password: "p", '
        f'permissions: {{ publish: {{ allow: [{names}] }}, subscribe: ">" }} }}] }}'
    )


async def desk_with(server: NatsServer) -> tuple[Bus, Desk]:
    config = BusConfig(url=server.url, user="u", password="p", connect_timeout_s=20.0)  # type: ignore[arg-type]
    bus = await Bus.connect(config, service="desk", instance="desk-0", registry=CollectorRegistry())
    desk = Desk()
    await bus.attach([FILE_LISTENER], desk)
    return bus, desk


async def test_every_refusal_is_an_error(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_VERDICT_S", PATIENCE_S)
    bus, desk = await desk_with(make_server(jetstream=False, extra_config=only(FILED)).start())
    started_s = time.monotonic()
    for subject in (NOTED, CAPITALS, NOTED):
        with pytest.raises(PermissionRefused, match=f"may not publish to {subject}"):
            await bus.publish(subject, Note())
    results = await asyncio.gather(*(bus.publish(NOTED, Note()) for _ in range(5)), return_exceptions=True)
    assert [type(result) for result in results] == [PermissionRefused] * 5
    assert time.monotonic() - started_s < PATIENCE_S / 2, "it was said, not waited for"
    for number in range(3):
        await bus.publish(FILED, Note(number=number))
    await until(lambda: desk.filed == [0, 1, 2])
    await bus.close()


async def test_permissions_that_change_are_noticed(make_server: MakeServer) -> None:
    server = make_server(jetstream=False, extra_config=only(FILED)).start()
    bus, desk = await desk_with(server)
    await bus.publish(FILED, Note(number=1))
    server.reload(only(NOTED))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(PermissionRefused):
            while True:
                await bus.publish(FILED, Note(number=2))
                await asyncio.sleep(0.01)
    await bus.publish(NOTED, Note())
    server.reload(only(FILED))
    async with asyncio.timeout(PATIENCE_S):
        while 3 not in desk.filed:
            try:
                await bus.publish(FILED, Note(number=3))
            except PermissionRefused:
                await asyncio.sleep(0.01)
    await bus.close()


async def test_a_frozen_server_holds_nobody_up(nats_server: NatsServer, connect_bus: ConnectBus) -> None:
    bus, desk = await connect_bus("desk", "desk-0"), Desk()
    await bus.attach([FILE_LISTENER], desk)
    nats_server.freeze()
    started_s = time.monotonic()
    await bus.publish(FILED, Note(number=1))
    assert 0.9 < time.monotonic() - started_s < 1.0 + BUSY_S
    nats_server.thaw()
    await bus.publish(FILED, Note(number=2))
    await until(lambda: desk.filed == [1, 2])


async def test_a_user_without_an_inbox_is_told_so(make_server: MakeServer) -> None:
    permissions = 'password: "p", permissions: { publish: ">", subscribe: "_INBOX_u.>" }'
    users = ", ".join(f'{{ user: "{name}", {permissions} }}' for name in ("u", "v"))
    server = make_server(jetstream=False, extra_config=f"authorization {{ users: [{users}] }}").start()
    config = BusConfig(url=server.url, user="u", password="p")  # type: ignore[arg-type]
    bus = await Bus.connect(config, service="desk", instance="desk-0", registry=CollectorRegistry())
    await bus.close()
    other = config.model_copy(update={"user": "v"})
    with pytest.raises(PermissionRefused, match="_INBOX_v"):
        await Bus.connect(other, service="desk", instance="desk-0", registry=CollectorRegistry())


async def test_an_answer_to_a_question_of_before_a_restart_is_no_refusal(make_server: MakeServer) -> None:
    """The leave to answer is the connection's: whoever was asked before a restart may not answer after it."""
    user = (
        'authorization { users: [{ user: "u", password: "p", permissions: { publish: { allow: '
        '["kvasir.v1.cmd.desk.>", "$SRV.>"] }, subscribe: ">", allow_responses: '
        '{ max: 1, expires: "2m" } } }] }'
    )
    server = make_server(jetstream=False, extra_config=user).start()
    config = BusConfig(url=server.url, user="u", password="p", connect_timeout_s=20.0)  # type: ignore[arg-type]
    registry = CollectorRegistry()
    bus = await Bus.connect(config, service="desk", instance="desk-0", registry=registry)
    desk = Desk()
    await bus.attach([ASK_ENDPOINT], desk)
    desk.gate.clear()
    asked = asyncio.create_task(bus.request(ASK, Question(), Answer, deadline_s=PATIENCE_S))
    await until(lambda: desk.running == 1)
    server.kill()
    with pytest.raises(BusUnavailable):
        await asked
    server.start()
    await until(lambda: bus.connected)
    desk.gate.set()
    assert (await bus.request(ASK, Question(number=5), Answer, deadline_s=PATIENCE_S)).number == 5
    assert metric(registry, "kvasir_bus_errors_total", side="connection", code="permission_refused") == 0
    await bus.close()


SUBJECT = "kvasir.test.express"
LIMITED = """
authorization { users: [
  { user: narrow, password: "s3cret", permissions: { publish: ["kvasir.test.express"], subscribe: [">"] } }
  { user: wide, password: "s3cret" }
] }
"""


class Sent(Message, frozen=True, kw_only=True):
    number: int
    text: str = ""


class Reader:
    def __init__(self) -> None:
        self.numbers: list[int] = []

    def on_note(self, note: Sent) -> None:
        self.numbers.append(note.number)


LISTENERS = (Listener(SUBJECT, Sent, "on_note"),)


def dialled(config: BusConfig, registry: CollectorRegistry | None = None) -> Express:
    return Express.connect(config, "express-0", BusCounters(registry or CollectorRegistry()))


async def test_messages_arrive_in_order_and_are_counted(
    connect_bus: ConnectBus, bus_config: BusConfig
) -> None:
    reader, registry = Reader(), CollectorRegistry()
    await (await connect_bus()).attach(LISTENERS, reader)
    express = dialled(bus_config, registry)
    for number in range(0, 200, 2):
        assert express.publish([(SUBJECT, Sent(number=number)), (SUBJECT, Sent(number=number + 1))])
    await until(lambda: len(reader.numbers) == 200)
    express.close()
    labels = {"direction": "out", "kind": "Sent"}
    assert reader.numbers == list(range(200))
    assert registry.get_sample_value("kvasir_bus_messages_total", labels) == 200
    assert not express.publish([(SUBJECT, Sent(number=0))])


async def test_pings_are_answered_for_as_long_as_it_is_attended(make_server: MakeServer) -> None:
    server = make_server(jetstream=False, extra_config="ping_interval: 100ms\nping_max: 2").start()
    attended, neglected = dialled(BusConfig(url=server.url)), dialled(BusConfig(url=server.url))
    for _ in range(60):
        await asyncio.sleep(0.02)
        attended.attend()
    neglected.attend()
    assert attended.is_up and not neglected.is_up
    attended.close()


async def test_what_the_user_may_not_publish_is_refused_from_then_on(make_server: MakeServer) -> None:
    server = make_server(jetstream=False, extra_config=LIMITED).start()
    express = dialled(BusConfig(url=server.url, user="narrow", password=SecretStr("s3cret")))
    other = [("kvasir.test.Other", Sent(number=1))]

    def is_refused() -> bool:
        express.attend()
        return not express.publish(other)

    await until(is_refused)
    assert express.is_up and express.publish([(SUBJECT, Sent(number=2))])
    express.close()


async def test_a_message_over_the_limit_is_refused(make_server: MakeServer) -> None:
    server = make_server(jetstream=False, extra_config="max_payload: 2000").start()
    express = dialled(BusConfig(url=server.url))
    assert not express.publish([(SUBJECT, Sent(number=1)), (SUBJECT, Sent(number=2, text="x" * 2000))])
    assert express.publish([(SUBJECT, Sent(number=3))])
    express.close()


async def test_a_server_that_does_not_read_is_given_up(
    nats_server: NatsServer, bus_config: BusConfig
) -> None:
    express = dialled(bus_config.model_copy(update={"outbound_buffer_bytes": 1 << 20}))
    note, longest_s = Sent(number=1, text="x" * 100_000), 0.0
    nats_server.freeze()
    try:
        for _ in range(400):
            began_s = time.perf_counter()
            sent = express.publish([(SUBJECT, note)])
            longest_s = max(longest_s, time.perf_counter() - began_s)
            if not sent:
                break
    finally:
        nats_server.thaw()
    assert not sent and not express.is_up and longest_s < 1.0


async def test_a_server_that_ends_is_noticed(nats_server: NatsServer, bus_config: BusConfig) -> None:
    express = dialled(bus_config)
    nats_server.kill()

    def is_over() -> bool:
        express.attend()
        return not express.is_up

    await until(is_over)
    assert not express.publish([(SUBJECT, Sent(number=1))])
    with pytest.raises(BusUnavailable):
        dialled(bus_config)


async def test_wrong_passwords_and_encrypted_buses_are_unavailable(make_server: MakeServer) -> None:
    server = make_server(jetstream=False, extra_config=LIMITED).start()
    with pytest.raises(BusUnavailable, match="Authorization"):
        dialled(BusConfig(url=server.url, user="wide", password=SecretStr("wrong")))
    with_user = server.url.replace("nats://", "nats://wide:s3cret@")
    dialled(BusConfig(url=with_user)).close()
    with pytest.raises(BusUnavailable, match="not encrypted"):
        dialled(BusConfig(url=server.url.replace("nats://", "tls://")))
