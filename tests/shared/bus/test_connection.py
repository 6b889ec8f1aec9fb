"""What a service may rely on, each against a real nats-server."""

import asyncio
import gc
import json
import warnings
from contextlib import suppress

import msgpack  # type: ignore[import-untyped]
import nats
import pytest
from opentelemetry import context, trace
from prometheus_client import CollectorRegistry

from shared import errors
from shared.bus import Bus, Endpoint, Listener
from shared.config import BusConfig
from shared.messages.base import Empty
from tests.conftest import ConnectBus, MakeServer
from tests.nats_server import NatsServer
from tests.patience import PATIENCE_S, until
from tests.shared.bus.desk import (
    ASK,
    ASK_ENDPOINT,
    CENSUS,
    CENSUS_GATHERABLE,
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


async def desk_on(connect_bus: ConnectBus, registry: CollectorRegistry | None = None) -> tuple[Bus, Desk]:
    bus, desk = await connect_bus("desk", "desk-0", registry), Desk()
    await bus.attach(HANDLERS, desk)
    return bus, desk


async def test_an_express_connection_that_nobody_waits_for_is_closed(connect_bus: ConnectBus) -> None:
    bus = await connect_bus("worker", "worker-0")
    for rounds in range(10):
        opening = asyncio.create_task(bus.express())
        await asyncio.sleep(0.0005 * rounds)
        opening.cancel()
        with suppress(asyncio.CancelledError):
            (await opening).close()
    await asyncio.get_running_loop().shutdown_default_executor()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gc.collect()
    assert not [each for each in caught if issubclass(each.category, ResourceWarning)]


async def test_nobody_there_is_no_responder_at_once(connect_bus: ConnectBus) -> None:
    caller = await connect_bus()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(errors.NoResponder, match=r"kvasir\.v1\.cmd\.desk\.ask"):
            await caller.request(ASK, Question(), Answer, deadline_s=60)


async def test_a_late_answer_is_deadline_exceeded(connect_bus: ConnectBus) -> None:
    registry = CollectorRegistry()
    _, desk = await desk_on(connect_bus)
    caller = await connect_bus(registry=registry)
    desk.gate.clear()
    with pytest.raises(errors.DeadlineExceeded, match=r"0\.05 s"):
        await caller.request(ASK, Question(), Answer, deadline_s=0.05)
    desk.gate.set()
    assert metric(registry, "kvasir_bus_errors_total", side="caller", code="deadline_exceeded") == 1
    assert (await caller.request(ASK, Question(number=2), Answer, deadline_s=PATIENCE_S)).number == 2


async def test_errors_keep_their_type_and_fields(connect_bus: ConnectBus) -> None:
    await desk_on(connect_bus)
    caller = await connect_bus()
    with pytest.raises(errors.ContextOverflow) as raised:
        await caller.request(ASK, Question(text="typed"), Answer, deadline_s=PATIENCE_S)
    error = raised.value
    assert (error.message, error.param, error.retry_after_s) == ("too long", "prompt", 2.5)


async def test_a_reply_of_another_type_is_an_invalid_message(connect_bus: ConnectBus) -> None:
    await desk_on(connect_bus)
    caller = await connect_bus()
    with pytest.raises(errors.InvalidMessage, match="Note"):
        await caller.request(ASK, Question(text="x"), NumberedNote, deadline_s=PATIENCE_S)


class NumberedNote(Note, frozen=True, kw_only=True):
    page: int


async def test_an_oversize_message_is_refused_before_it_is_sent(connect_bus: ConnectBus) -> None:
    _, desk = await desk_on(connect_bus)
    caller = await connect_bus()
    huge = "x" * (1024 * 1024 - 100)  # fits the server's limit of 1 MiB, but not with headers
    with pytest.raises(errors.MessageTooLarge):
        await caller.request(ASK, Question(text=huge), Answer, deadline_s=PATIENCE_S)
    with pytest.raises(errors.MessageTooLarge):
        await caller.publish(NOTED, Note(text=2 * huge))
    await caller.publish(NOTED, Note(text=huge, number=1))
    await until(lambda: desk.noted == [1])
    assert desk.most_running == 0


async def test_our_own_limit_may_be_lower_than_the_servers(connect_bus: ConnectBus) -> None:
    caller = await connect_bus(max_payload_bytes=2048)
    with pytest.raises(errors.MessageTooLarge, match="over the limit of 2048"):
        await caller.publish(NOTED, Note(text="x" * 2048))


async def test_an_oversize_reply_is_an_error_at_the_caller_not_a_timeout(connect_bus: ConnectBus) -> None:
    await desk_on(connect_bus)
    caller = await connect_bus()
    with pytest.raises(errors.MessageTooLarge, match="the reply on"):
        await caller.request(ASK, Question(reply_bytes=1024 * 1024), Answer, deadline_s=PATIENCE_S)


async def test_gather_hears_every_instance_and_leaves_errors_out(connect_bus: ConnectBus) -> None:
    for name in ("desk-0", "desk-1", "broken"):
        bus = await connect_bus("desk", name)
        await bus.attach([CENSUS_GATHERABLE], Desk(name))
    registry = CollectorRegistry()
    caller = await connect_bus(registry=registry)
    answers = await caller.gather(CENSUS, Question(), Answer, deadline_s=0.5)
    assert {answer.text for answer in answers} == {"desk-0", "desk-1"}
    assert metric(registry, "kvasir_bus_errors_total", side="caller", code="internal_error") == 1
    async with asyncio.timeout(PATIENCE_S):
        assert len(await caller.gather(CENSUS, Question(), Answer, deadline_s=60, expected=2)) == 2
        assert await caller.gather("kvasir.v1.cmd.nobody.census", Question(), Answer, deadline_s=60) == []


async def test_instance_subjects_and_queue_groups(connect_bus: ConnectBus) -> None:
    desks = []
    for index in (0, 1):
        bus, desk = await connect_bus("desk", f"desk-{index}"), Desk(f"desk-{index}")
        await bus.attach(
            [
                Endpoint(lambda instance: f"{CENSUS}.{instance}", Question, "census"),
                Listener(NOTED, Note, "note", queue="one"),
            ],
            desk,
        )
        desks.append(desk)
    caller = await connect_bus()
    for index in (0, 1):
        answer = await caller.request(f"{CENSUS}.desk-{index}", Question(), Answer, deadline_s=PATIENCE_S)
        assert answer.text == f"desk-{index}"
    for number in range(20):
        await caller.publish(NOTED, Note(number=number))
    await until(lambda: sorted(desks[0].noted + desks[1].noted) == list(range(20)))


async def test_detach_leaves_the_rest_served(connect_bus: ConnectBus) -> None:
    bus, desk = await desk_on(connect_bus)
    caller = await connect_bus()
    await bus.detach([ASK_ENDPOINT])
    with pytest.raises(errors.NoResponder):
        await caller.request(ASK, Question(), Answer, deadline_s=PATIENCE_S)
    assert len(await caller.gather(CENSUS, Question(), Answer, deadline_s=PATIENCE_S, expected=1)) == 1
    await bus.attach([ASK_ENDPOINT], desk)
    assert (await caller.request(ASK, Question(number=1), Answer, deadline_s=PATIENCE_S)).number == 1


async def test_nothing_is_served_after_the_block_that_serves(connect_bus: ConnectBus) -> None:
    """A message at the end began tasks in a group that had ended."""
    bus, caller = await connect_bus("desk", "desk-0"), await connect_bus()
    async with bus.served_within():
        await bus.attach(HANDLERS, Desk())
        assert (await caller.request(ASK, Question(number=1), Answer, deadline_s=PATIENCE_S)).number == 1
    with pytest.raises(errors.NoResponder):
        await caller.request(ASK, Question(), Answer, deadline_s=PATIENCE_S)
    assert bus.connected


async def test_micro_discovery_lists_the_endpoints(connect_bus: ConnectBus, nats_server: NatsServer) -> None:
    bus, _ = await desk_on(connect_bus)
    caller = await connect_bus()
    with pytest.raises(errors.InternalError):
        await caller.request(ASK, Question(text="foreign"), Answer, deadline_s=PATIENCE_S)
    tool = await nats.connect(nats_server.url)
    info = json.loads((await tool.request("$SRV.INFO.kvasir-desk", timeout=PATIENCE_S)).data)
    assert info["metadata"]["instance"] == "desk-0"
    assert {endpoint["subject"] for endpoint in info["endpoints"]} == {ASK, CENSUS}
    stats = json.loads((await tool.request("$SRV.STATS.kvasir-desk", timeout=PATIENCE_S)).data)
    counted = {endpoint["subject"]: endpoint for endpoint in stats["endpoints"]}[ASK]
    assert (counted["num_requests"], counted["num_errors"]) == (1, 1)
    assert counted["processing_time"] > 0 and "combination" not in json.dumps(stats)
    await bus.detach([ASK_ENDPOINT])
    info = json.loads((await tool.request("$SRV.INFO.kvasir-desk", timeout=PATIENCE_S)).data)
    assert {endpoint["subject"] for endpoint in info["endpoints"]} == {CENSUS}
    await tool.close()


async def test_an_independent_client_can_ask(connect_bus: ConnectBus, nats_server: NatsServer) -> None:
    await desk_on(connect_bus)
    tool = await nats.connect(nats_server.url)
    reply = await tool.request(ASK, msgpack.packb({"text": "hello", "from_later_on": 1}), timeout=PATIENCE_S)
    assert msgpack.unpackb(reply.data) == {"text": "hello"}
    reply = await tool.request(ASK, msgpack.packb({"text": "typed"}), timeout=PATIENCE_S)
    headers = {"Nats-Service-Error": "context_length_exceeded", "Nats-Service-Error-Code": "400"}
    assert reply.headers == headers and msgpack.unpackb(reply.data)["param"] == "prompt"
    await tool.close()


async def test_traces_travel_with_commands_only(connect_bus: ConnectBus, nats_server: NatsServer) -> None:
    await desk_on(connect_bus)
    caller = await connect_bus()
    tool = await nats.connect(nats_server.url)
    events = await tool.subscribe(NOTED)
    await tool.flush()
    span = trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    token = context.attach(trace.set_span_in_context(trace.NonRecordingSpan(span)))
    answer = await caller.request(ASK, Question(), Answer, deadline_s=PATIENCE_S)
    await caller.publish(NOTED, Note())
    context.detach(token)
    assert answer.trace_id == f"{0xABC:032x}" and (await events.next_msg(timeout=PATIENCE_S)).headers is None
    assert (await caller.request(ASK, Question(), Answer, deadline_s=PATIENCE_S)).trace_id is None
    await tool.close()


async def test_close_lets_running_handlers_answer(connect_bus: ConnectBus) -> None:
    bus, desk = await desk_on(connect_bus)
    caller = await connect_bus()
    desk.gate.clear()
    asking = asyncio.create_task(caller.request(ASK, Question(number=7), Answer, deadline_s=PATIENCE_S))
    await until(lambda: desk.running == 1)
    asyncio.get_running_loop().call_later(0.05, desk.gate.set)
    await bus.close()
    assert (await asking).number == 7
    await bus.close()
    assert not bus.connected
    with pytest.raises(errors.BusUnavailable, match="closed"):
        await bus.publish(NOTED, Note())
    with pytest.raises(errors.BusUnavailable, match="closed"):
        await bus.request(ASK, Question(), Answer, deadline_s=PATIENCE_S)


async def test_close_gives_a_stuck_handler_up_and_says_so(connect_bus: ConnectBus) -> None:
    bus, desk = await connect_bus("desk", "desk-0", drain_timeout_s=0.05), Desk()
    await bus.attach([ASK_ENDPOINT], desk)
    caller = await connect_bus()
    desk.gate.clear()
    asking = asyncio.create_task(caller.request(ASK, Question(), Answer, deadline_s=PATIENCE_S))
    await until(lambda: desk.running == 1)
    async with asyncio.timeout(PATIENCE_S):
        await bus.close()
    with pytest.raises(errors.InternalError, match="CancelledError"):
        await asking


async def test_a_cancelled_request_is_forgotten(connect_bus: ConnectBus) -> None:
    _, desk = await desk_on(connect_bus)
    caller = await connect_bus()
    desk.gate.clear()
    asking = asyncio.create_task(caller.request(ASK, Question(), Answer, deadline_s=PATIENCE_S))
    await until(lambda: desk.running == 1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert not caller._inbox._waiting
    desk.gate.set()
    assert (await caller.request(ASK, Question(number=5), Answer, deadline_s=PATIENCE_S)).number == 5


async def test_a_permission_violation_is_not_a_timeout(make_server: MakeServer) -> None:
    deny = (
        f'permissions: {{ publish: {{ deny: ["{CENSUS}", "{NOTED}"] }}, subscribe: {{ deny: "{NOTED}" }} }}'
    )
    users = f'authorization {{ users: [{{ user: "u", password: "p", {deny} }}] }}'
    server = make_server(jetstream=False, extra_config=users).start()
    registry = CollectorRegistry()
    config = BusConfig(url=server.url, user="u", password="p")  # type: ignore[arg-type]
    bus = await Bus.connect(config, service="desk", instance="desk-0", registry=registry)
    with pytest.raises(errors.PermissionRefused, match=r"may not subscribe to kvasir\.v1\.evt\.desk\.noted"):
        await bus.attach([NOTE_LISTENER], Desk())
    async with asyncio.timeout(10):
        for question in (bus.request, bus.gather):
            with pytest.raises(errors.PermissionRefused, match=r"may not publish to .*\.cmd\.desk\.census"):
                await question(CENSUS, Empty(), Empty, deadline_s=60)
        with pytest.raises(errors.PermissionRefused, match=r"may not publish to .*\.evt\.desk\.noted"):
            await bus.publish(NOTED, Note())
    refusals = metric(registry, "kvasir_bus_errors_total", side="connection", code="permission_refused")
    assert refusals == 4
    await bus.attach([ASK_ENDPOINT], Desk())
    assert (await bus.request(ASK, Question(number=9), Answer, deadline_s=PATIENCE_S)).number == 9
    await bus.close()


async def test_messages_are_counted_by_kind(connect_bus: ConnectBus) -> None:
    here, there = CollectorRegistry(), CollectorRegistry()
    _, desk = await desk_on(connect_bus, there)
    caller = await connect_bus(registry=here)
    await caller.request(ASK, Question(), Answer, deadline_s=PATIENCE_S)
    await caller.publish(FILED, Note(number=1))
    await until(lambda: desk.filed == [1])
    assert metric(here, "kvasir_bus_messages_total", direction="out", kind="Question") == 1
    assert metric(here, "kvasir_bus_messages_total", direction="out", kind="Note") == 1
    assert metric(there, "kvasir_bus_messages_total", direction="in", kind="Question") == 1
    assert metric(there, "kvasir_bus_messages_total", direction="in", kind="Note") == 1
    assert metric(there, "kvasir_bus_handler_seconds_count", kind="Question") == 1
    assert metric(here, "kvasir_bus_connected") == 1
