"""Open sequences on a bus where nobody answers, told by hand what happened; and waits, which all end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from pytest import MonkeyPatch

from services.gateway import exchange as module
from services.gateway.config import GatewayConfig
from services.gateway.core.stream import Stream, StreamEffects, StreamPhase, StreamTiming, Submit
from services.gateway.core.views import ShardViews
from services.gateway.counters import Counters
from services.gateway.errors import body_of, status_of
from services.gateway.exchange import Dispatch, Exchange, NoticeOutbox, OpenChoice, admitted
from services.gateway.openai.admission import AdmittedRequest
from services.gateway.sessions import Sessions
from services.gateway.text.choice_text import TextRules
from services.gateway.text.tokenizer import Codec
from shared import spans, subjects
from shared.bus import Bus, Endpoint, Listener, tracing
from shared.errors import InternalError, Overloaded, UnavailableError, WorkerKilled
from shared.messages.commands import CancelSequence, SubmitReply, SubmitSequence
from shared.messages.reports import SchedulerAnnounced, SequenceFinished, WorkerLost
from shared.messages.sequence import FinishReason, Sampling, pack_tokens, proof_of
from shared.messages.tokens import AcknowledgeEnds, TokenDelta, TokenFrame
from tests.nats_server import NatsServer
from tests.patience import PATIENCE_S, until
from tests.services.gateway.core.test_views import report
from tests.services.gateway.fakes import cancelled
from tests.shared.messages.builders import cancelling, ref

W = ("worker-0", 1)


def said(
    exchange: Exchange, choice: int, tokens: tuple[int, ...], end: FinishReason | None = None
) -> TokenFrame:
    """By the worker that was given the sequence."""
    stream = exchange.sequences[choice].stream
    proof = proof_of(stream.capability, *W)
    return frame(TokenDelta(*stream.key, stream.attempt, 0, tokens, end, proof=proof))


def frame(delta: TokenDelta) -> TokenFrame:
    return TokenFrame(*W, (delta,))


class Learner:
    """Keeps the finished sequences."""

    HANDLERS = (Listener(subjects.GATEWAY_FINISHED, SequenceFinished, "on_finished"),)

    def __init__(self) -> None:
        self.finished: list[SequenceFinished] = []

    def on_finished(self, event: SequenceFinished) -> None:
        self.finished.append(event)


def job(prompts: int = 1, n: int = 1, **fields: Any) -> AdmittedRequest:
    sampling = Sampling(seed=1, max_tokens=10, end_token_ids=(2,))
    defaults: dict[str, Any] = {"kind": "chat", "rules": TextRules(), "stream": False, "include_usage": False}
    return AdmittedRequest(
        prompts=((5, 6, 7),) * prompts, samplings=(sampling,) * prompts, n=n, **defaults | fields
    )


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest_asyncio.fixture
async def desk(connect_bus: Callable[..., Awaitable[Bus]], clock: list[float]) -> AsyncIterator[Sessions]:
    config = GatewayConfig.model_validate({"served_name": "m", "max_active_sequences": 4})
    async with asyncio.TaskGroup() as tasks:
        desk = Sessions(config, await connect_bus("gateway", "gateway-0"), tasks, lambda: clock[0])
        sending = tasks.create_task(desk.dispatch.outbox.run())
        yield desk
        sending.cancel()


async def test_each_choice_and_prompt_is_a_sequence_of_its_own(desk: Sessions, codec: Codec) -> None:
    exchange = desk.open(job(prompts=2, n=2), "req_1")
    keys = [sequence.stream.key for sequence in exchange.sequences]
    assert keys == [("req_1", 0), ("req_1", 1), ("req_1-1", 0), ("req_1-1", 1)] and desk.active == 4
    assert [answer.index for answer in desk.answers(exchange, job(2, 2), codec)] == [0, 1, 2, 3]
    with pytest.raises(Overloaded):
        desk.open(job(), "req_2")
    desk.close(exchange)
    assert desk.active == 0
    assert {sequence.stream.phase for sequence in exchange.sequences} == {StreamPhase.CANCELLED}
    desk.open(job(), "req_2")


async def test_answers_are_told_to_learners(
    desk: Sessions, connect_bus: Callable[..., Awaitable[Bus]]
) -> None:
    learner = Learner()
    await (await connect_bus()).attach(Learner.HANDLERS, learner)
    exchange = desk.open(job(n=3), "req_1")
    desk.on_frame(said(exchange, 0, (8, 9, 2), FinishReason.STOP))
    desk.on_frame(said(exchange, 1, (8, 9, 9)))
    desk.finish(exchange.sequences[1], output_tokens=2)
    desk.finish(exchange.sequences[0], output_tokens=1)
    desk.close(exchange)
    await until(lambda: len(learner.finished) == 3)
    await asyncio.sleep(0.05)
    told = sorted((one.ref.choice, one.output_tokens, one.finish_reason) for one in learner.finished)
    assert told == [(0, 3, FinishReason.STOP), (1, 2, FinishReason.STOP), (2, 0, FinishReason.CANCELLED)]
    assert [one.ref.choice for one in learner.finished if not one.prompt] == [2]


async def test_frames_that_come_together_wake_the_reader_once(desk: Sessions) -> None:
    exchange, seen = desk.open(job(), "req_1"), list[int]()
    stream = exchange.sequences[0].stream

    def on_news() -> bool:
        seen.append(len(stream.tokens))
        return True

    exchange.on_news = on_news
    desk.on_frame(said(exchange, 0, (5,)))
    desk.on_frame(frame(TokenDelta(*stream.key, stream.attempt, 1, (6, 7))))
    assert not seen and stream.tokens == [5, 6, 7]
    await asyncio.sleep(0)
    assert seen == [3], "the tokens of both are written at once"
    desk.on_frame(frame(TokenDelta(*stream.key, stream.attempt, 3, (8,))))
    await asyncio.sleep(0)
    assert seen == [3, 4]


async def test_a_silent_worker_is_lost_on_the_tick(desk: Sessions, clock: list[float]) -> None:
    exchange = desk.open(job(), "req_1")
    desk.on_worker_reported(report("worker-0"))
    desk.on_frame(said(exchange, 0, (8,)))
    clock[0] = 2.9
    desk.on_tick()
    assert exchange.sequences[0].stream.attempt == 1
    clock[0] = 3.1
    desk.on_tick()
    assert exchange.sequences[0].stream.attempt == 2


SAMPLING = Sampling(seed=5, max_tokens=10)


def exchange_of(choices: int) -> Exchange:
    exchange = Exchange(accepted_s=1.0)
    for choice in range(choices):
        stream = Stream(("req", choice), StreamTiming(), 0.0)
        stream.submit(0.0)
        prompt = pack_tokens([1, 2, 3])
        exchange.sequences.append(OpenChoice(stream, prompt, SAMPLING, exchange))
    return exchange


def accept(exchange: Exchange, at: int) -> None:
    exchange.sequences[at].stream.on_submitted(1, 0.0)
    exchange.changed.set()


async def test_a_request_that_kills_its_workers_runs_alone_and_then_fails(
    desk: Sessions, clock: list[float]
) -> None:
    """It went from worker to worker: 15 of 15 died, with all that ran beside it."""
    other = replace(job(), prompts=((8, 9),))
    poison, beside = desk.open(job(), "poison"), desk.open(other, "beside")
    for deaths in range(1, 4):
        assert poison.failure is None
        desk.on_frame(said(poison, 0, tuple(range(deaths))))
        if deaths == 1:
            desk.on_frame(said(beside, 0, (1,)))
        desk.lose(W, {})
        spec = poison.sequences[0].spec("gateway-0", 1, 0.0)
        assert spec.runs_alone == (deaths >= 2) and poison.sequences[0].deaths == deaths
    assert not beside.sequences[0].spec("gateway-0", 1, 0.0).runs_alone
    with pytest.raises(WorkerKilled) as caught:
        poison.check()
    assert status_of(caught.value)[0] == 500 and body_of(caught.value)["error"]["code"] == "worker_killed"
    assert "3 workers died" in str(body_of(caught.value)["error"]["message"])
    assert beside.failure is None and beside.sequences[0].stream.is_open
    with pytest.raises(WorkerKilled, match="refused for 10 minutes"):
        desk.open(job(), "again")
    desk.refuse([b"seen by another"])
    assert list(desk.refused.values()) == [True, False] and desk.active == 1
    clock[0] += 601.0
    assert desk.refused == {} and desk.open(job(), "later").failure is None


async def test_workers_that_fall_silent_count_half(desk: Sessions) -> None:
    """Where the network broke twice after a death, a harmless request failed."""
    asked = desk.open(job(), "asked")
    for number, is_dead in enumerate((True, False, True, False), start=1):
        assert asked.failure is None
        desk.on_frame(said(asked, 0, tuple(range(number))))
        lost = WorkerLost(worker_id=W[0], incarnation=W[1], refs=(), is_dead=is_dead)
        desk.on_worker_lost(lost)
    assert isinstance(asked.failure, WorkerKilled)


async def test_no_request_outlasts_schedulers_for_ever(desk: Sessions) -> None:
    """One whose core failed in every term took it, again and again: it waited without end."""
    served, waiting = desk.open(job(), "served"), desk.open(job(), "waiting")
    for epoch in range(1, 20):
        event = SchedulerAnnounced(scheduler_id="scheduler-0", incarnation=epoch, epoch=epoch, policy="p")
        desk.on_scheduler_announced(event)
        if epoch % 4 == 0:
            desk.on_frame(said(served, 0, tuple(range(10, 10 + epoch // 4))))
        assert served.failure is None
        assert (waiting.failure is None) == (epoch <= 8)
    assert isinstance(waiting.failure, UnavailableError)
    with pytest.raises(UnavailableError, match="8 schedulers failed"):
        waiting.check()


async def test_admission_waits_for_all() -> None:
    exchange = exchange_of(2)
    waiting = asyncio.create_task(admitted(exchange, 5))
    accept(exchange, 0)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    accept(exchange, 1)
    await asyncio.wait_for(waiting, PATIENCE_S)


async def test_an_answer_that_cannot_be_written_fails_alone() -> None:
    exchange = exchange_of(1)
    exchange.on_news = lambda: bool(1 // 0)
    exchange.notify()
    with pytest.raises(InternalError, match="ZeroDivisionError"):
        await asyncio.wait_for(exchange.wait(), PATIENCE_S)


def test_what_was_taken_once_is_submitted_as_resumed() -> None:
    """So that a scheduler that is new, or busy, does not refuse it."""
    exchange = exchange_of(1)
    (sequence,) = exchange.sequences
    assert not sequence.spec("g", 9, 3.5).is_resumed
    accept(exchange, 0)
    assert sequence.spec("g", 9, 3.5).is_resumed
    (inherited,) = exchange_of(1).sequences
    inherited.exchange.is_resumed = True
    assert inherited.spec("g", 9, 3.5).is_resumed


ConnectBus = Callable[..., Awaitable[Bus]]
REF = ref("req")
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Peer:
    """Scheduler and worker in one."""

    HANDLERS = (
        Endpoint(subjects.ANY_SCHEDULER_SUBMIT, SubmitSequence, "submit"),
        Listener(subjects.worker_cancel.to, CancelSequence, "on_worker", sender="sender"),
        Listener(subjects.worker_acknowledge.to, AcknowledgeEnds, "on_worker", sender="sender"),
    )

    def __init__(self) -> None:
        self.submits: list[SubmitSequence] = []
        self.traces: list[str | None] = []
        self.to_worker: list[Any] = []

    async def submit(self, command: SubmitSequence) -> SubmitReply:
        self.submits.append(command)
        self.traces.append(spans.trace_id())
        return SubmitReply(scheduler_id="s", incarnation=1, epoch=1)

    def on_worker(self, message: Any) -> None:
        self.to_worker.append(message)


class Bench:
    """A dispatch, a sequence, and what was applied to it."""

    def __init__(self, bus: Bus, tasks: asyncio.TaskGroup, peer: Peer) -> None:
        config = GatewayConfig.model_validate({"submit_deadline_s": 1.0, "fetch_deadline_s": 0.3})
        self.peer = peer
        self.applied: list[StreamEffects] = []
        self.dispatch = Dispatch(config, bus, tasks, lambda: 0.0, Counters(), self.apply, ShardViews(3.0))
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
    assert command.spec.ref == REF and command.spec.gateway_id == "gateway-0"
    assert bench.peer.traces == ["0af7651916cd43dd8448eb211c80319c"]


async def test_a_superseded_submission_is_not_sent(bench: Bench) -> None:
    (old,) = bench.stream.submit(0.0)
    (new,) = bench.stream.on_worker_lost(("w", 1), 1, 0.0)
    await bench.carry_out(old, new)
    await asyncio.sleep(0.05)
    assert [command.spec.ref.attempt for command in bench.peer.submits] == [2]


async def test_an_unforeseen_error_is_tried_again(
    bench: Bench, monkeypatch: MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr(OpenChoice, "spec", broken)
    (submit,) = bench.stream.submit(0.0)
    assert isinstance(submit, Submit)
    await bench.carry_out(submit)
    assert "surprise" in caplog.text and bench.stream.is_open and bench.stream.on_tick(0.2) == (Submit(1, 2),)


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


async def test_a_full_outbox_drops_its_oldest(connect_bus: ConnectBus, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MESSAGES", 3)
    reader = Peer()
    await (await connect_bus("worker", "worker-0")).attach(Peer.HANDLERS, reader)
    outbox = NoticeOutbox(await connect_bus())
    for number in range(5):
        outbox.put(subjects.worker_cancel("worker-0", "gateway-0"), cancel(number))
    await outbox.flush()
    await until(lambda: len(reader.to_worker) == 3)
    assert reader.to_worker == [cancel(2), cancel(3), cancel(4)]


async def test_a_bus_that_hangs_does_not_stop_it(connect_bus: ConnectBus, nats_server: NatsServer) -> None:
    bus = await connect_bus()
    outbox = NoticeOutbox(bus)
    await bus.close()
    outbox.put(subjects.worker_cancel("worker-0", "gateway-0"), cancel(0))
    outbox.acknowledge("worker-0", ref("req_0"))
    await asyncio.wait_for(outbox.flush(), PATIENCE_S)
    await asyncio.wait_for(outbox.flush(), PATIENCE_S)
