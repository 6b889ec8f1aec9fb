"""The error boundary, lanes and inline handlers: order across subscriptions, nothing queued, and an end that
loses nothing. Trace context survives the headers; its absence costs nothing.
"""

import asyncio
import time
from itertools import pairwise

import nats
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.aio.msg import Msg
from opentelemetry import context
from prometheus_client import CollectorRegistry

from shared import errors, spans, subjects
from shared.bus import Bus, Endpoint, Listener, tracing
from shared.bus.client import TURN_S
from shared.bus.serving import Lanes, handle_inline, subject_for
from shared.messages.base import Message, decode, encode
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
async def test_invalid_bytes_are_refused(
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


async def test_concurrency_is_bounded_and_more_is_overloaded(connect_bus: ConnectBus) -> None:
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
    assert [a.number for a in outcomes if isinstance(a, Answer)] == list(range(7)) and desk.most_running == 4


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
    assert desk.filed == list(range(51)) and caplog.text.count("slow consumer: kvasir.v1.evt.desk.filed") == 1


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


def test_a_subject_may_depend_on_the_instance() -> None:
    assert subject_for("kvasir.v1.evt.x", "worker-0") == "kvasir.v1.evt.x"
    assert subject_for(subjects.worker_plan, "worker-0") == "kvasir.v1.cmd.worker.plan.worker-0"
    with pytest.raises(ValueError, match="no instance id"):
        subject_for(lambda instance: f"x.{instance}", "worker.*")


@settings(max_examples=60)
@given(
    concurrency=st.integers(1, 4),
    pending_limit=st.integers(0, 5),
    turns=st.lists(st.tuples(st.sampled_from(["offer", "finish"]), st.integers(0, 9)), max_size=40),
)
def test_lanes_against_a_model(concurrency: int, pending_limit: int, turns: list[tuple[str, int]]) -> None:
    """Never more at once than lanes, never more waiting than the limit, started in order, nothing lost."""

    async def play() -> None:
        started: list[int] = []
        running: dict[int, asyncio.Event] = {}

        async def work(item: int) -> None:
            started.append(item)
            running[item] = asyncio.Event()
            await running[item].wait()
            del running[item]

        lanes = Lanes(work, concurrency, pending_limit)
        taken: list[int] = []
        for number, (turn, choice) in enumerate(turns):
            if turn == "offer":
                full = len(running) == concurrency and lanes.pending == pending_limit
                assert lanes.offer(number) is not full
                taken += [] if full else [number]
            elif running:
                sorted(running.items())[choice % len(running)][1].set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len(running) <= concurrency and lanes.pending <= pending_limit
        while running:
            for event in list(running.values()):
                event.set()
            await asyncio.sleep(0)
        assert started == taken
        await lanes.stop(0.0)

    asyncio.run(play())


@pytest.mark.parametrize("turns", range(6))
async def test_what_comes_while_a_lane_ends_is_run(turns: int) -> None:
    """A lane that has looked for the last time takes nothing any more, though its task is not done yet."""
    done: list[int] = []

    async def work(item: int) -> None:
        await asyncio.sleep(0)
        done.append(item)

    lanes = Lanes(work, concurrency=1, pending_limit=9)
    lanes.offer(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    lanes.offer(1)
    for _ in range(9):
        await asyncio.sleep(0)
    assert done == [0, 1]
    await lanes.stop(0.0)


EVENTS = ("kvasir.test.one", "kvasir.test.two")


class Numbered(Message, frozen=True, kw_only=True):
    number: int


class Reader:
    def __init__(self) -> None:
        self.one: list[int] = []
        self.both: list[int] = []

    def on_one(self, note: Numbered) -> None:
        self.one.append(note.number)
        self.both.append(note.number)

    def on_two(self, note: Numbered) -> None:
        self.both.append(note.number)


async def test_order_holds_across_subscriptions(connect_bus: ConnectBus) -> None:
    reader, bus, sender = Reader(), await connect_bus(), await connect_bus()
    listeners = tuple(Listener(s, Numbered, m) for s, m in zip(EVENTS, ("on_one", "on_two"), strict=True))
    await bus.attach(listeners, reader)
    for number in range(200):
        await sender.publish(EVENTS[number % 2], Numbered(number=number))
    await until(lambda: len(reader.both) == 200)
    assert reader.both == list(range(200)) and reader.one == list(range(0, 200, 2))
    await bus.detach(listeners, reader)


async def test_many_messages_at_once_leave_the_loop_to_others(connect_bus: ConnectBus) -> None:
    """They come in one piece. Each takes a millisecond, so without a pause the loop would be held for as many
    as there are, and nothing else have a turn."""
    bus, sender, most = await connect_bus(), await connect_bus(), 300
    handled, turns = [], list[int]()

    async def never(_: object) -> None:
        raise AssertionError("nats-py's own task is not used")

    def hold(for_s: float) -> None:
        until_s = time.perf_counter() + for_s
        while time.perf_counter() < until_s:
            pass

    def work(msg: Msg) -> None:
        hold(0.001)
        handled.append(msg.data)

    async def others() -> None:
        while len(handled) < most:
            turns.append(len(handled))
            await asyncio.sleep(0)

    subscription = await bus._link.client.subscribe(EVENTS[0], cb=never)
    handle_inline(subscription, work)
    await bus._link.barrier()
    notes = [encode(Numbered(number=number)) for number in range(most)]
    counting = asyncio.create_task(others())  # from the start: the first ones come while the last are sent
    for note in notes:
        await sender._link.client.publish(EVENTS[0], note)
    await sender._link.barrier()
    hold(0.1)  # Meanwhile the rest of them arrives.
    async with asyncio.timeout(PATIENCE_S):
        await counting
    assert handled == notes
    longest = max(after - before for before, after in pairwise([0, *turns, most]))
    assert longest <= TURN_S / 0.001 + 1
    await subscription.drain()  # type: ignore[no-untyped-call]


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_headers_become_the_current_trace_and_headers_again() -> None:
    token = tracing.attach({"traceparent": PARENT, "tracestate": "vendor=1"})
    assert spans.trace_id() == "0af7651916cd43dd8448eb211c80319c"
    assert tracing.inject() == {"traceparent": PARENT, "tracestate": "vendor=1"}
    tracing.detach(token)
    assert spans.trace_id() is None and tracing.inject() is None


def test_no_or_broken_headers_leave_no_trace() -> None:
    for headers in (
        None,
        {},
        {"other": "x"},
        {"traceparent": "x"},
        {"traceparent": PARENT.replace("-", "_")},
    ):
        before = context.get_current()
        token = tracing.attach(headers)
        assert spans.trace_id() is None
        tracing.detach(token)
        assert context.get_current() == before
