"""Frames, reports and heartbeats reach the bus in order; a bus that cannot take them loses them and
nothing else."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from services.worker.core.frames import AddressedFrame
from services.worker.core.steps import StepEffects
from services.worker.egress import Courier, Heartbeat, Outbox
from shared import subjects
from shared.bus import Bus, Express, Listener
from shared.bus.counters import BusCounters
from shared.config import BusConfig
from shared.errors import InternalError
from shared.messages.plans import WorkerStepped
from shared.messages.reports import WorkerReported
from shared.messages.sequence import FinishReason
from shared.messages.tokens import TokenDelta, TokenFrame
from tests.conftest import ConnectBus
from tests.nats_server import NatsServer
from tests.patience import until
from tests.shared.messages.builders import worker_report


def effects(number: int, finish_reason: FinishReason | None = None) -> StepEffects:
    at: dict[str, Any] = {"choice": 0, "attempt": 1, "first_index": number}
    delta = TokenDelta(request_id="r", tokens=(number,), finish_reason=finish_reason, **at)
    frame = TokenFrame(worker_id="worker-0", incarnation=1, deltas=(delta,))
    numbers: dict[str, Any] = {
        "incarnation": 1,
        "seq": number + 1,
        "epoch": 1,
        "plan_seq": 1,
        "steps_done": 1,
    }
    stepped = WorkerStepped(worker_id="worker-0", plan_over=True, **numbers)
    return StepEffects((AddressedFrame("gateway-0", frame),), (stepped,))


class Reader:
    """What a gateway and a scheduler received."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.tokens: list[int] = []
        self.seqs: list[int] = []

    def on_frame(self, frame: TokenFrame) -> None:
        self.tokens += [token for delta in frame.deltas for token in delta.tokens]

    def on_stepped(self, stepped: WorkerStepped) -> None:
        self.seqs.append(stepped.seq)

    async def until_seq(self, seq: int) -> None:
        await until(lambda: seq in self.seqs)


LISTENERS = (
    Listener(subjects.tokens.to("gateway-0"), TokenFrame, "on_frame"),
    Listener(subjects.ANY_WORKER_STEPPED, WorkerStepped, "on_stepped"),
)


@pytest_asyncio.fixture
async def reader(connect_bus: ConnectBus) -> Reader:
    made = Reader(await connect_bus("tester", "reader-0"))
    await made.bus.attach(LISTENERS, made)
    return made


@asynccontextmanager
async def drained(outbox: Outbox) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        draining = tasks.create_task(outbox.drain())
        yield
        draining.cancel()


async def test_messages_arrive_in_order(connect_bus: ConnectBus, reader: Reader) -> None:
    outbox = Outbox(await connect_bus("worker", "worker-0"))
    async with drained(outbox):
        for number in range(200):
            outbox.put(outbox.addressed(effects(number)))
            if number % 50 == 0:
                await asyncio.sleep(0)
        await reader.until_seq(200)
    assert reader.seqs == list(range(1, 201)) and reader.tokens == list(range(200))


class Desk:
    """A courier whose loop is the test's own, and how often it was asked to run something."""

    def __init__(self, bus: Bus, *, drop_final_frames: bool = False) -> None:
        self.bus, self.calls = bus, 0
        self.outbox = Outbox(bus, drop_final_frames=drop_final_frames)
        self.courier = Courier(self.outbox, self._on_loop)
        self._loop = asyncio.get_running_loop()

    def _on_loop(self, call: Callable[[], None]) -> None:
        self.calls += 1
        self._loop.call_soon_threadsafe(call)

    async def deliver(self, *many: StepEffects) -> None:
        """On a thread, as the engine's."""
        for each in many:
            await asyncio.to_thread(self.courier.deliver, each)


def dialled(config: BusConfig) -> Express:
    return Express.connect(config, "worker-0", BusCounters(CollectorRegistry()))


@pytest_asyncio.fixture
async def desk(connect_bus: ConnectBus) -> AsyncIterator[Desk]:
    made = Desk(await connect_bus("worker", "worker-0"))
    yield made
    made.courier.close()


async def test_the_loop_is_passed_by_while_the_express_is_up(
    desk: Desk, reader: Reader, bus_config: BusConfig
) -> None:
    desk.courier.offer(dialled(bus_config))
    assert not desk.courier.wants_express
    await desk.deliver(*(effects(number) for number in range(50)))
    await reader.until_seq(50)
    assert reader.tokens == list(range(50)) and reader.seqs == list(range(1, 51)) and desk.calls == 0


async def test_what_waits_in_the_loop_is_not_overtaken(
    desk: Desk, reader: Reader, bus_config: BusConfig
) -> None:
    await desk.deliver(effects(0))
    await until(lambda: desk.outbox.waiting)
    desk.courier.offer(dialled(bus_config))
    await desk.deliver(effects(1))
    async with drained(desk.outbox):
        await reader.until_seq(2)
    await desk.deliver(effects(2))
    await reader.until_seq(3)
    assert reader.tokens == [0, 1, 2] and desk.calls == 2


@pytest.mark.parametrize("replaced", [True, False])
async def test_a_lost_connection_costs_nothing_that_was_not_sent(
    desk: Desk, reader: Reader, bus_config: BusConfig, nats_server: NatsServer, replaced: bool
) -> None:
    async with drained(desk.outbox):
        desk.courier.offer(dialled(bus_config))
        await desk.deliver(effects(0))
        await reader.until_seq(1)
        nats_server.kill()
        await until(lambda: not desk.bus.connected)
        await asyncio.to_thread(desk.courier.attend)
        assert desk.courier.wants_express
        nats_server.start()
        await until(lambda: desk.bus.connected and reader.bus.connected)
        if replaced:
            desk.courier.offer(dialled(bus_config))
        await desk.deliver(effects(1))
        await reader.until_seq(2)
    assert reader.tokens == [0, 1]
    assert (desk.calls == 0) is replaced


async def test_the_courier_can_drop_final_frames_on_purpose(
    connect_bus: ConnectBus, bus_config: BusConfig, reader: Reader
) -> None:
    desk = Desk(await connect_bus("worker", "worker-0"), drop_final_frames=True)
    desk.courier.offer(dialled(bus_config))
    await desk.deliver(effects(0), effects(1, FinishReason.STOP), effects(2))
    await reader.until_seq(3)
    assert reader.tokens == [0, 2]
    desk.courier.close()


def report(stepped_seq: int = 0) -> WorkerReported:
    return worker_report(seq=0, stepped_seq=stepped_seq)


class Engine:
    """Answers questions when told to."""

    def __init__(self) -> None:
        self.asked: list[Future[WorkerReported]] = []

    def ask(self) -> "Future[WorkerReported]":
        self.asked.append(Future())
        return self.asked[-1]


async def test_the_last_report_stands_in_while_the_engine_is_busy_and_sections_are_asked_for_each_time() -> (
    None
):
    """A report that stands in while the engine is busy says what is lent now, not what was."""
    engine, hosts = Engine(), iter("abcd")
    heartbeat = Heartbeat(engine.ask, lambda _: {"host": next(hosts)}, interval_s=0.02)
    assert await heartbeat.next() is None
    engine.asked[0].set_result(report(stepped_seq=5))
    sent = [await heartbeat.next(), await heartbeat.next()]
    sent += [heartbeat.number(report(stepped_seq=8)), await heartbeat.next()]
    told = [(r.seq, r.stepped_seq, r.host) for r in sent if r is not None]
    assert told == [(1, 5, "a"), (2, 5, "b"), (3, 8, "c"), (4, 8, "d")] and len(engine.asked) == 2


async def test_an_engine_that_stays_silent_is_given_up() -> None:
    stuck = [False, False, True]
    heartbeat = Heartbeat(Engine().ask, interval_s=0.02, is_stuck=lambda: stuck.pop(0))
    assert await heartbeat.next() is None and await heartbeat.next() is None
    with pytest.raises(InternalError, match="is stuck"):
        await heartbeat.next()
