"""The express connection: what it sends arrives in order, what it cannot is refused; it never waits."""

import asyncio
import time

import pytest
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from shared.bus import Express, Listener
from shared.bus.counters import BusCounters
from shared.config import BusConfig
from shared.errors import BusUnavailable
from shared.messages.base import Message
from tests.conftest import ConnectBus, MakeServer
from tests.nats_server import NatsServer
from tests.patience import until

SUBJECT = "kvasir.test.express"
LIMITED = """
authorization { users: [
  { user: narrow, password: "s3cret", permissions: { publish: ["kvasir.test.express"], subscribe: [">"] } }
  { user: wide, password: "s3cret" }
] }
"""


class Note(Message, frozen=True, kw_only=True):
    number: int
    text: str = ""


class Reader:
    def __init__(self) -> None:
        self.numbers: list[int] = []

    def on_note(self, note: Note) -> None:
        self.numbers.append(note.number)


LISTENERS = (Listener(SUBJECT, Note, "on_note"),)


def dialled(config: BusConfig, registry: CollectorRegistry | None = None) -> Express:
    return Express.connect(config, "express-0", BusCounters(registry or CollectorRegistry()))


async def test_messages_arrive_in_order_and_are_counted(
    connect_bus: ConnectBus, bus_config: BusConfig
) -> None:
    reader, registry = Reader(), CollectorRegistry()
    await (await connect_bus()).attach(LISTENERS, reader)
    express = dialled(bus_config, registry)
    for number in range(0, 200, 2):
        assert express.publish([(SUBJECT, Note(number=number)), (SUBJECT, Note(number=number + 1))])
    await until(lambda: len(reader.numbers) == 200)
    express.close()
    labels = {"direction": "out", "kind": "Note"}
    assert reader.numbers == list(range(200))
    assert registry.get_sample_value("kvasir_bus_messages_total", labels) == 200
    assert not express.publish([(SUBJECT, Note(number=0))])


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
    other = [("kvasir.test.Other", Note(number=1))]

    def is_refused() -> bool:
        express.attend()
        return not express.publish(other)

    await until(is_refused)
    assert express.is_up and express.publish([(SUBJECT, Note(number=2))])
    express.close()


async def test_a_message_over_the_limit_is_refused(make_server: MakeServer) -> None:
    server = make_server(jetstream=False, extra_config="max_payload: 2000").start()
    express = dialled(BusConfig(url=server.url))
    assert not express.publish([(SUBJECT, Note(number=1)), (SUBJECT, Note(number=2, text="x" * 2000))])
    assert express.publish([(SUBJECT, Note(number=3))])
    express.close()


async def test_a_server_that_does_not_read_is_given_up_without_waiting(
    nats_server: NatsServer, bus_config: BusConfig
) -> None:
    express = dialled(bus_config.model_copy(update={"outbound_buffer_bytes": 1 << 20}))
    note, longest_s = Note(number=1, text="x" * 100_000), 0.0
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
    assert not express.publish([(SUBJECT, Note(number=1))])
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
