"""Publishing where the server says no, says no later on, and says yes again."""

import asyncio
import time

import pytest
from prometheus_client import CollectorRegistry

from shared.bus import Bus, clearance
from shared.config import BusConfig
from shared.errors import BusUnavailable, PermissionRefused
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


async def test_the_first_and_every_later_refusal_is_an_error(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clearance, "_VERDICT_S", PATIENCE_S)
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


async def test_a_frozen_server_does_not_hold_publishers_up(
    nats_server: NatsServer, connect_bus: ConnectBus
) -> None:
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
