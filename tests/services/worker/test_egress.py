"""Frames and reports reach the bus in order, over the express connection where there is one; a bus that
cannot take them loses them and nothing else."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from services.worker.core.frames import AddressedFrame
from services.worker.core.steps import StepEffects
from services.worker.egress import Courier, Outbox
from shared import subjects
from shared.bus import Bus, Express, Listener
from shared.bus.counters import BusCounters
from shared.config import BusConfig
from shared.messages.plans import WorkerStepped
from shared.messages.sequence import FinishReason
from shared.messages.tokens import TokenDelta, TokenFrame
from tests.conftest import ConnectBus
from tests.nats_server import NatsServer
from tests.patience import until


def effects(number: int, finish_reason: FinishReason | None = None) -> StepEffects:
    delta = TokenDelta(
        request_id="r", choice=0, attempt=1, first_index=number, tokens=(number,), finish_reason=finish_reason
    )
    frame = TokenFrame(worker_id="worker-0", incarnation=1, deltas=(delta,))
    stepped = WorkerStepped(
        worker_id="worker-0", incarnation=1, seq=number + 1, epoch=1, plan_seq=1, steps_done=1, plan_over=True
    )
    return StepEffects((AddressedFrame("gateway-0", frame),), (stepped,))


class Reader:
    """What a gateway and a scheduler received."""

    def __init__(self) -> None:
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
    made = Reader()
    await (await connect_bus("tester", "reader-0")).attach(LISTENERS, made)
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
        self.calls = 0
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
    connect_bus: ConnectBus, bus_config: BusConfig, nats_server: NatsServer, replaced: bool
) -> None:
    reader = Reader()
    reader_bus = await connect_bus("tester", "reader-0")
    await reader_bus.attach(LISTENERS, reader)
    bus = await connect_bus("worker", "worker-0")
    desk = Desk(bus)
    draining = asyncio.create_task(desk.outbox.drain())
    desk.courier.offer(dialled(bus_config))
    await desk.deliver(effects(0))
    await reader.until_seq(1)
    nats_server.kill()
    await until(lambda: not bus.connected)
    await asyncio.to_thread(desk.courier.attend)
    assert desk.courier.wants_express
    nats_server.start()
    await until(lambda: bus.connected)
    if replaced:
        desk.courier.offer(dialled(bus_config))
    await until(lambda: reader_bus.connected)
    await desk.deliver(effects(1))
    await reader.until_seq(2)
    assert reader.tokens == [0, 1]
    assert (desk.calls == 0) is replaced
    draining.cancel()
    desk.courier.close()


async def test_the_courier_can_drop_final_frames_on_purpose(
    connect_bus: ConnectBus, bus_config: BusConfig, reader: Reader
) -> None:
    desk = Desk(await connect_bus("worker", "worker-0"), drop_final_frames=True)
    desk.courier.offer(dialled(bus_config))
    await desk.deliver(effects(0), effects(1, FinishReason.STOP), effects(2))
    await reader.until_seq(3)
    assert reader.tokens == [0, 2]
    desk.courier.close()
