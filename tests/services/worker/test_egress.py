"""Frames and reports reach the bus in order; a bus that cannot take them loses them and nothing else."""

import asyncio

from services.worker.core.frames import AddressedFrame
from services.worker.core.steps import StepEffects
from services.worker.egress import Outbox
from shared import subjects
from shared.bus import Listener
from shared.messages.plans import WorkerStepped
from shared.messages.sequence import FinishReason
from shared.messages.tokens import TokenDelta, TokenFrame
from tests.conftest import ConnectBus

DEADLINE_S = 10.0


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
        async with asyncio.timeout(DEADLINE_S):
            while seq not in self.seqs:
                await asyncio.sleep(0.005)


LISTENERS = (
    Listener(subjects.tokens.to("gateway-0"), TokenFrame, "on_frame"),
    Listener(subjects.ANY_WORKER_STEPPED, WorkerStepped, "on_stepped"),
)


async def test_messages_arrive_in_order(connect_bus: ConnectBus) -> None:
    reader = Reader()
    await (await connect_bus("tester", "reader-0")).attach(LISTENERS, reader)
    outbox = Outbox(await connect_bus("worker", "worker-0"))
    async with asyncio.TaskGroup() as tasks:
        draining = tasks.create_task(outbox.drain())
        for number in range(200):
            outbox.put(outbox.addressed(effects(number)))
            if number % 50 == 0:
                await asyncio.sleep(0)
        await reader.until_seq(200)
        draining.cancel()
    assert reader.seqs == list(range(1, 201)) and reader.tokens == list(range(200))


async def test_final_frames_can_be_dropped_on_purpose(connect_bus: ConnectBus) -> None:
    reader = Reader()
    await (await connect_bus("tester", "reader-0")).attach(LISTENERS, reader)
    outbox = Outbox(await connect_bus("worker", "worker-0"), drop_final_frames=True)
    async with asyncio.TaskGroup() as tasks:
        draining = tasks.create_task(outbox.drain())
        outbox.put(outbox.addressed(effects(0)))
        outbox.put(outbox.addressed(effects(1, FinishReason.STOP)))
        outbox.put(outbox.addressed(effects(2)))
        await reader.until_seq(3)
        draining.cancel()
    assert reader.tokens == [0, 2] and reader.seqs == [1, 2, 3]


async def test_a_closed_bus_does_not_end_the_task(connect_bus: ConnectBus) -> None:
    bus = await connect_bus("worker", "worker-0")
    await bus.close()
    outbox = Outbox(bus)
    draining = asyncio.create_task(outbox.drain())
    outbox.put(outbox.addressed(effects(0)))
    await asyncio.sleep(0.05)
    assert not draining.done()
    draining.cancel()
