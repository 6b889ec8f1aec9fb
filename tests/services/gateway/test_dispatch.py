"""StreamEffects become commands on the bus, and their outcomes events of the stream. Small messages: in
order, acknowledgements together, never in the way."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from services.gateway import dispatch as module
from services.gateway.config import GatewayConfig
from services.gateway.core.effects import StreamEffects, Submit
from services.gateway.core.stream import Stream, StreamTiming
from services.gateway.counters import Counters
from services.gateway.dispatch import Dispatch, NoticeOutbox
from services.gateway.exchange import Exchange, OpenChoice
from shared import subjects
from shared.bus import Bus, Endpoint, Listener, tracing
from shared.messages.commands import CancelSequence, SubmitReply, SubmitSequence
from shared.messages.sequence import Sampling, pack_tokens
from shared.messages.tokens import AcknowledgeEnds, FetchedTokens, FetchTokens, TokenDelta
from tests.nats_server import NatsServer
from tests.patience import PATIENCE_S, until
from tests.services.gateway.fakes import cancelled
from tests.shared.messages.builders import cancelling, ref

ConnectBus = Callable[..., Awaitable[Bus]]
REF = ref("req")
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Peer:
    """Scheduler and worker in one."""

    HANDLERS = (
        Endpoint(subjects.ANY_SCHEDULER_SUBMIT, SubmitSequence, "submit"),
        Listener(subjects.ANY_SCHEDULER_CANCEL, CancelSequence, "on_scheduler", sender="sender"),
        Endpoint(subjects.worker_fetch.to, FetchTokens, "fetch", sender="sender"),
        Listener(subjects.worker_cancel.to, CancelSequence, "on_worker", sender="sender"),
        Listener(subjects.worker_acknowledge.to, AcknowledgeEnds, "on_worker", sender="sender"),
    )

    def __init__(self) -> None:
        self.submits: list[SubmitSequence] = []
        self.traces: list[str | None] = []
        self.refusal: Exception | None = None
        self.answer: TokenDelta | None = None
        self.to_scheduler: list[Any] = []
        self.to_worker: list[Any] = []

    async def submit(self, command: SubmitSequence) -> SubmitReply:
        self.submits.append(command)
        self.traces.append(tracing.trace_id())
        if self.refusal is not None:
            raise self.refusal
        return SubmitReply(scheduler_id="s", incarnation=1, epoch=1)

    async def fetch(self, question: FetchTokens) -> FetchedTokens:
        return FetchedTokens(delta=self.answer)

    def on_scheduler(self, message: Any) -> None:
        self.to_scheduler.append(message)

    def on_worker(self, message: Any) -> None:
        self.to_worker.append(message)


class Bench:
    """A dispatch, a sequence, and what was applied to it."""

    def __init__(self, bus: Bus, tasks: asyncio.TaskGroup, peer: Peer) -> None:
        config = GatewayConfig.model_validate({"submit_deadline_s": 1.0, "fetch_deadline_s": 0.3})
        self.peer = peer
        self.applied: list[StreamEffects] = []
        self.dispatch = Dispatch(config, bus, tasks, lambda: 0.0, Counters(), self.apply)
        self.stream = Stream(("req", 0), StreamTiming(), 0.0)
        sampling = Sampling(seed=1, max_tokens=10)
        exchange = Exchange()
        exchange.context.run(tracing.attach, {"traceparent": TRACE})
        self.sequence = OpenChoice(self.stream, pack_tokens([1, 2]), sampling, exchange)

    def apply(self, sequence: OpenChoice, effects: StreamEffects) -> None:
        assert sequence is self.sequence
        self.applied.append(effects)

    async def carry_out(self, *effects: Any) -> None:
        for effect in effects:
            self.dispatch.carry_out(self.sequence, effect)
        await until(lambda: bool(self.applied))


@pytest_asyncio.fixture
async def bench(connect_bus: ConnectBus) -> AsyncIterator[Bench]:
    peer = Peer()
    await (await connect_bus("worker", "w")).attach(Peer.HANDLERS, peer)
    async with asyncio.TaskGroup() as tasks:
        bench = Bench(await connect_bus("gateway", "gateway-0"), tasks, peer)
        sending = tasks.create_task(bench.dispatch.outbox.run())
        yield bench
        sending.cancel()


async def test_a_submission_carries_the_sequence_and_its_trace(bench: Bench) -> None:
    await bench.carry_out(*bench.stream.submit(0.0))
    assert bench.stream.accepted
    (command,) = bench.peer.submits
    assert command.spec.ref == REF
    assert command.spec.gateway_id == "gateway-0"
    assert bench.peer.traces == ["0af7651916cd43dd8448eb211c80319c"]


async def test_a_superseded_submission_is_not_sent(bench: Bench) -> None:
    (old,) = bench.stream.submit(0.0)
    (new,) = bench.stream.on_worker_lost(("w", 1), 1, 0.0)
    await bench.carry_out(old, new)
    await asyncio.sleep(0.05)
    assert [command.spec.ref.attempt for command in bench.peer.submits] == [2]


async def test_an_unforeseen_error_is_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr(OpenChoice, "spec", broken)
    (submit,) = bench.stream.submit(0.0)
    assert isinstance(submit, Submit)
    await bench.carry_out(submit)
    assert "surprise" in caplog.text
    assert bench.stream.is_open
    assert bench.stream.on_tick(0.2) == (Submit(1, 2),)


def cancel(number: int) -> CancelSequence:
    return cancelling(ref(f"req_{number}"))


async def test_messages_go_in_order_and_ends_together(connect_bus: ConnectBus) -> None:
    reader = Peer()
    await (await connect_bus("worker", "worker-0")).attach(Peer.HANDLERS, reader)
    outbox = NoticeOutbox(await connect_bus())
    for number in range(3):
        outbox.put(subjects.worker_cancel("worker-0", "gateway-0"), cancel(number))
        outbox.acknowledge("worker-0", ref(f"req_{number}"))
    outbox.acknowledge("worker-0", ref("req_2"))
    sending = asyncio.create_task(outbox.run())
    await until(lambda: len(reader.to_worker) == 4)
    await cancelled(sending)
    cancels = [message for message in reader.to_worker if isinstance(message, CancelSequence)]
    (acknowledged,) = [message for message in reader.to_worker if isinstance(message, AcknowledgeEnds)]
    assert cancels == [cancel(0), cancel(1), cancel(2)]
    assert sorted(r.request_id for r in acknowledged.refs) == ["req_0", "req_1", "req_2"]


async def test_a_full_outbox_drops_its_oldest(
    connect_bus: ConnectBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_MESSAGES", 3)
    reader = Peer()
    await (await connect_bus("worker", "worker-0")).attach(Peer.HANDLERS, reader)
    outbox = NoticeOutbox(await connect_bus())
    for number in range(5):
        outbox.put(subjects.worker_cancel("worker-0", "gateway-0"), cancel(number))
    await outbox.flush()
    await until(lambda: len(reader.to_worker) == 3)
    assert reader.to_worker == [cancel(2), cancel(3), cancel(4)]


async def test_a_bus_that_takes_nothing_does_not_stop_it(
    connect_bus: ConnectBus, nats_server: NatsServer
) -> None:
    bus = await connect_bus()
    outbox = NoticeOutbox(bus)
    await bus.close()
    outbox.put(subjects.worker_cancel("worker-0", "gateway-0"), cancel(0))
    outbox.acknowledge("worker-0", ref("req_0"))
    await asyncio.wait_for(outbox.flush(), PATIENCE_S)
    await asyncio.wait_for(outbox.flush(), PATIENCE_S)
