"""Lanes without a bus.

Inline handlers: order across subscriptions, nothing queued, and an end that loses nothing.

Trace context survives the headers; its absence costs nothing.
"""

import asyncio
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.aio.msg import Msg
from opentelemetry import context

from shared import subjects
from shared.bus import Listener, tracing
from shared.bus.link import TURN_S
from shared.bus.serving import Lanes, handle_inline, subject_for
from shared.messages.base import Message, encode
from tests.conftest import ConnectBus
from tests.patience import PATIENCE_S, until


def test_a_subject_may_depend_on_the_instance() -> None:
    assert subject_for("kvasir.v1.evt.x", "worker-0") == "kvasir.v1.evt.x"
    assert subject_for(subjects.worker_plan, "worker-0") == "kvasir.v1.cmd.worker.plan.worker-0"
    with pytest.raises(ValueError, match="no instance id"):
        subject_for(lambda instance: f"x.{instance}", "worker.*")


@settings(max_examples=60, deadline=None)
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


async def test_stop_waits_for_what_runs_and_waits_then_cancels() -> None:
    done: list[int] = []

    async def work(item: int) -> None:
        await asyncio.sleep(60 if item == 2 else 0.01)
        done.append(item)

    lanes = Lanes(work, concurrency=1, pending_limit=9)
    for item in (0, 1, 2, 3):
        assert lanes.offer(item)
    async with asyncio.timeout(PATIENCE_S):
        await lanes.stop(0.2)
    assert done == [0, 1] and lanes.pending == 0


EVENTS = ("kvasir.test.one", "kvasir.test.two")


class Note(Message, frozen=True, kw_only=True):
    number: int


class Reader:
    def __init__(self) -> None:
        self.one: list[int] = []
        self.both: list[int] = []

    def on_one(self, note: Note) -> None:
        self.one.append(note.number)
        self.both.append(note.number)

    def on_two(self, note: Note) -> None:
        self.both.append(note.number)


async def test_order_holds_across_subscriptions(connect_bus: ConnectBus) -> None:
    reader, bus, sender = Reader(), await connect_bus(), await connect_bus()
    listeners = tuple(Listener(s, Note, m) for s, m in zip(EVENTS, ("on_one", "on_two"), strict=True))
    await bus.attach(listeners, reader)
    for number in range(200):
        await sender.publish(EVENTS[number % 2], Note(number=number))
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
    notes = [encode(Note(number=number)) for number in range(most)]
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
    assert tracing.trace_id() == "0af7651916cd43dd8448eb211c80319c"
    assert tracing.inject() == {"traceparent": PARENT, "tracestate": "vendor=1"}
    tracing.detach(token)
    assert tracing.trace_id() is None and tracing.inject() is None


def test_no_or_broken_headers_leave_no_trace() -> None:
    for headers in (
        None,
        {},
        {"other": "x"},
        {"traceparent": "nonsense"},
        {"traceparent": PARENT.replace("-", "_")},
    ):
        before = context.get_current()
        token = tracing.attach(headers)
        assert tracing.trace_id() is None
        tracing.detach(token)
        assert context.get_current() == before
