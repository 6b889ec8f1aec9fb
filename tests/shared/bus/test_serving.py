"""The error boundary and the lanes, against a real nats-server."""

import asyncio

import nats
import pytest
from prometheus_client import CollectorRegistry

from shared import errors
from shared.bus import Bus, Endpoint, Listener
from shared.messages.base import decode
from tests.conftest import ConnectBus
from tests.nats_server import NatsServer
from tests.patience import PATIENCE_S, until
from tests.shared.bus.desk import ASK, FILED, HANDLERS, NOTED, Answer, Desk, Note, Question, metric


async def served(connect_bus: ConnectBus) -> tuple[Desk, Bus, CollectorRegistry]:
    registry, desk = CollectorRegistry(), Desk()
    bus = await connect_bus("desk", "desk-0", registry)
    await bus.attach(HANDLERS, desk)
    return desk, await connect_bus(), registry


async def test_a_handler_that_raises_cancelled_error_goes_on_serving(connect_bus: ConnectBus) -> None:
    desk, caller, _ = await served(connect_bus)
    for _ in range(6):  # more often than there are lanes
        with pytest.raises(errors.InternalError, match="CancelledError in the handler"):
            await caller.request(ASK, Question(text="cancelled"), Answer, deadline_s=PATIENCE_S)
        await caller.publish(NOTED, Note(text="cancelled"))
        await caller.publish(FILED, Note(text="cancelled"))
    assert (await caller.request(ASK, Question(number=1), Answer, deadline_s=PATIENCE_S)).number == 1
    await caller.publish(NOTED, Note(number=2))
    await caller.publish(FILED, Note(number=3))
    await until(lambda: desk.noted == [2] and desk.filed == [3])


async def test_the_text_of_a_foreign_exception_stays_here(
    connect_bus: ConnectBus, nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    _, caller, registry = await served(connect_bus)
    with pytest.raises(errors.InternalError, match="ValueError in the handler"):
        await caller.request(ASK, Question(text="foreign"), Answer, deadline_s=PATIENCE_S)
    tool = await nats.connect(nats_server.url)
    raw = await tool.request(ASK, b"\x81\xa4text\xa7foreign", timeout=PATIENCE_S)
    assert b"1234" not in raw.data and "1234" not in str(raw.headers)
    await tool.close()
    assert "the safe's combination is 1234" in caplog.text  # for the operator, with the traceback
    assert metric(registry, "kvasir_bus_errors_total", side="handler", code="internal_error") == 2


async def test_a_listener_survives_its_handlers_exceptions(connect_bus: ConnectBus) -> None:
    desk, caller, registry = await served(connect_bus)
    await caller.publish(NOTED, Note(text="foreign"))
    await caller.publish(NOTED, Note(number=1))
    await until(lambda: desk.noted == [1])
    assert metric(registry, "kvasir_bus_errors_total", side="handler", code="internal_error") == 1


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\x81\xa4text\x01", b"\x81\xa4text\xa2\xff\xfe", b"\x91" * 5000, b"\x93\x01\x02\x03"],
)
async def test_invalid_bytes_are_the_senders_fault(
    connect_bus: ConnectBus, nats_server: NatsServer, data: bytes
) -> None:
    desk, caller, registry = await served(connect_bus)
    tool = await nats.connect(nats_server.url)
    reply = await tool.request(ASK, data, timeout=PATIENCE_S)
    with pytest.raises(errors.InvalidMessage):
        raise errors.from_wire(decode(reply.data, dict))
    await tool.publish(NOTED, data)
    await tool.publish(FILED, data)
    await tool.close()
    await caller.publish(NOTED, Note(number=1))
    await until(lambda: desk.noted == [1])
    await until(
        lambda: metric(registry, "kvasir_bus_errors_total", side="handler", code="invalid_message") == 3
    )
    assert desk.most_running == 0


async def test_concurrency_is_bounded_and_what_exceeds_the_queue_is_overloaded(
    connect_bus: ConnectBus,
) -> None:
    desk, caller, _ = await served(connect_bus)
    desk.gate.clear()
    asking = [
        asyncio.create_task(caller.request(ASK, Question(number=number), Answer, deadline_s=PATIENCE_S))
        for number in range(9)
    ]
    done, _ = await asyncio.wait(asking, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    await until(lambda: sum(task.done() for task in asking) == 2)  # 4 run, 3 wait, 2 are refused
    for task in done:
        with pytest.raises(errors.Overloaded) as raised:
            await task
        assert raised.value.retry_after_s == 1.0
    desk.gate.set()
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    assert [a.number for a in outcomes if isinstance(a, Answer)] == list(range(7))
    assert desk.most_running == 4


async def test_one_lane_keeps_the_order(connect_bus: ConnectBus) -> None:
    desk, caller, _ = await served(connect_bus)
    desk.gate.clear()
    for number in range(40):
        await caller.publish(FILED, Note(number=number))
    await until(lambda: desk.running == 1)
    desk.gate.set()
    await until(lambda: len(desk.filed) == 40)
    assert desk.filed == list(range(40)) and desk.most_running == 1


async def test_a_slow_consumer_loses_messages_and_that_is_counted_and_logged(
    connect_bus: ConnectBus, caplog: pytest.LogCaptureFixture
) -> None:
    desk, caller, registry = await served(connect_bus)
    desk.gate.clear()
    for number in range(61):
        await caller.publish(FILED, Note(number=number))
    await until(lambda: metric(registry, "kvasir_bus_slow_consumer_drops_total", kind="Note") == 10)
    desk.gate.set()
    await until(lambda: len(desk.filed) == 51)
    assert desk.filed == list(range(51))
    assert caplog.text.count("slow consumer: kvasir.v1.evt.desk.filed") == 1


async def test_many_lanes_run_side_by_side(connect_bus: ConnectBus) -> None:
    desk, bus = Desk(), await connect_bus("desk", "desk-0")
    await bus.attach([Listener(FILED, Note, "file", concurrency=3)], desk)
    desk.gate.clear()
    for number in range(5):
        await bus.publish(FILED, Note(number=number))
    await until(lambda: desk.running == 3)
    desk.gate.set()
    await until(lambda: sorted(desk.filed) == list(range(5)))
    assert desk.most_running == 3


async def test_nobody_speaks_in_another_s_name(connect_bus: ConnectBus) -> None:
    """NATS lets an instance publish under its own name alone; what the message says has to be that name."""
    stem, desk, registry = "kvasir.v1.evt.desk.noted", Desk(), CollectorRegistry()
    bus = await connect_bus("desk", "desk-0", registry)
    table = (
        Listener(f"{stem}.*", Note, "note", sender="text"),
        Listener("kvasir.v1.evt.desk.filed.*", Note, "file", sender="text"),
        Endpoint("kvasir.v1.cmd.desk.ask.*", Question, "ask", sender="text"),
    )
    await bus.attach(table, desk)
    caller = await connect_bus()
    for sender, number in (("worker-1", 1), ("worker-0", 2)):
        await caller.publish(f"{stem}.{sender}", Note(text="worker-0", number=number))
        await caller.publish(f"kvasir.v1.evt.desk.filed.{sender}", Note(text="worker-0", number=number))
    await until(lambda: desk.noted == [2] and desk.filed == [2])
    assert metric(registry, "kvasir_bus_errors_total", side="handler", code="invalid_message") == 2
    question = Question(text="worker-0")
    with pytest.raises(errors.InvalidMessage, match="calls itself 'worker-0'"):
        await caller.request("kvasir.v1.cmd.desk.ask.worker-1", question, Answer, deadline_s=PATIENCE_S)
    answer = await caller.request("kvasir.v1.cmd.desk.ask.worker-0", question, Answer, deadline_s=PATIENCE_S)
    assert answer.text == "worker-0"
