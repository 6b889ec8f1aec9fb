"""The gateway on a real bus and a real port: frames vanish, workers fall silent, schedulers change."""

import asyncio
import contextlib
import hashlib
import json
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from inspect import iscoroutinefunction
from pathlib import Path

import httpx
import msgspec
import pytest

from services.gateway.service import HANDLERS
from services.gateway.sessions import Sessions
from services.stack.obstructions import free_port
from shared import subjects
from shared.bus import Bus
from shared.messages.base import Empty
from shared.messages.reports import SequenceHandedOver, SequenceState, ServiceStatus
from shared.messages.sequence import FinishReason
from shared.messages.tokens import TokenDelta, TokenFrame
from tests.conftest import ConnectBus
from tests.nats_server import NatsServer
from tests.patience import PATIENCE_S, STACK_PATIENCE_S, until
from tests.services.gateway.conftest import ANSWER, KEY, MakeStack, Stack
from tests.services.gateway.fakes import HEARTBEAT_S, MODEL, FakeScheduler, FakeWorker, Held, cancelled
from tests.shared.messages.builders import worker_report


def text_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    content: str = reply.json()["choices"][0]["message"]["content"]
    return content


def holder(stack: Stack) -> FakeWorker:
    """The worker that holds a sequence."""
    return next(worker for worker in stack.workers if worker.held)


async def under_way(stack: Stack, tokens: int = 3) -> asyncio.Task[httpx.Response]:
    """A request of which some tokens have been computed."""
    request = asyncio.create_task(stack.chat(temperature=0))
    await until(lambda: any(len(h.tokens) >= tokens for w in stack.workers for h in w.held.values()))
    return request


async def test_lost_frames_are_fetched(stack: Stack) -> None:
    for worker in stack.workers:
        worker.edit = lambda delta: [] if delta.first_index % 5 == 3 else [delta]
    assert text_of(await stack.chat(temperature=0)) == ANSWER and len(stack.scheduler.submits) == 1


async def test_a_lost_last_frame_hangs_nobody(stack: Stack) -> None:
    for worker in stack.workers:
        worker.edit = lambda delta: [] if delta.finish_reason else [delta]
    assert text_of(await asyncio.wait_for(stack.chat(temperature=0), PATIENCE_S)) == ANSWER
    await until(lambda: not any(worker.held for worker in stack.workers))
    assert sum(len(worker.acknowledged) for worker in stack.workers) >= 1
    assert [spec.ref.attempt for spec in stack.scheduler.submits] == [1]


async def test_a_frozen_worker_is_replaced_and_waking_it_changes_nothing(stack: Stack) -> None:
    stack.pace(0.01)
    request = await under_way(stack)
    first = holder(stack)
    first.frozen = True
    await stack.scheduler.lose(first)
    await until(lambda: any(worker.held for worker in stack.workers if worker is not first))
    second = next(worker for worker in stack.workers if worker is not first)
    first.frozen = False
    (stale,) = first.held.values()
    stale.tokens[-1] = 5
    await first.send(stale.delta(len(stale.tokens) - 1), stale.spec.gateway_id)
    assert text_of(await request) == ANSWER
    assert [spec.ref.attempt for spec in stack.scheduler.submits] == [1, 2]
    await until(lambda: not first.held)
    assert stack.scheduler.submits[1].generated_tokens >= 1 and second.cancelled == []


async def test_a_restarted_worker_is_noticed(stack: Stack) -> None:
    stack.pace(0.01)
    request = await under_way(stack)
    first = holder(stack)
    first.held.clear()
    first.bus.incarnation += 1
    assert text_of(await request) == ANSWER and stack.scheduler.submits[-1].ref.attempt == 2


async def test_a_new_scheduler_is_given_what_runs(
    stack: Stack, connect_bus: Callable[..., asyncio.Future[Bus]]
) -> None:
    stack.pace(0.01)
    request = await under_way(stack)
    second = FakeScheduler(await connect_bus("scheduler", "scheduler-1"), stack.workers, epoch=2)
    second.known = dict(stack.scheduler.known)
    await stack.scheduler.bus.detach(FakeScheduler.HANDLERS[:1])
    loops = await second.start()
    try:
        await until(lambda: len(second.submits) == 1)
        assert second.submits[0].ref == stack.scheduler.submits[0].ref and text_of(await request) == ANSWER
    finally:
        for loop in loops:
            await cancelled(loop)


@pytest.mark.parametrize(("epoch", "attempts"), [(1, [1]), (7, [1, 2])])
async def test_what_an_earlier_leader_hands_over_stays_where_it_is(
    stack: Stack, epoch: int, attempts: list[int]
) -> None:
    stack.scheduler.epoch = 7
    await asyncio.sleep(3 * HEARTBEAT_S)
    stack.pace(0.02)
    request = await under_way(stack)
    handed = SequenceHandedOver(ref=stack.scheduler.submits[0].ref, shard=0, epoch=epoch)
    subject = subjects.scheduler_handed(stack.scheduler.submits[0].gateway_id)
    await stack.scheduler.bus.publish(subject, handed)
    assert text_of(await request) == ANSWER
    assert [spec.ref.attempt for spec in stack.scheduler.submits] == attempts


async def test_what_an_earlier_leader_takes_is_submitted_to_the_later(make_stack: MakeStack) -> None:
    stack = await make_stack(frame_timeout_s=50.0)
    scheduler, workers = stack.scheduler, stack.scheduler.workers
    scheduler.epoch = 7
    await asyncio.sleep(3 * HEARTBEAT_S)
    scheduler.epoch, scheduler.workers = 1, []
    request = asyncio.create_task(stack.chat(temperature=0))
    await until(lambda: len(scheduler.submits) >= 2, within_s=10.0)
    assert scheduler.submits[1].ref == scheduler.submits[0].ref
    scheduler.epoch, scheduler.workers = 7, workers
    scheduler.known.clear()
    assert text_of(await request) == ANSWER


async def test_a_request_survives_a_scheduler_that_is_late(stack: Stack) -> None:
    await stack.scheduler.bus.detach(FakeScheduler.HANDLERS[:1])
    request = asyncio.create_task(stack.chat(temperature=0))
    await asyncio.sleep(0.3)
    assert not request.done()
    await stack.scheduler.bus.attach(FakeScheduler.HANDLERS[:1], stack.scheduler)
    assert text_of(await request) == ANSWER


async def test_a_bus_that_restarts_loses_nothing(stack: Stack, nats_server: NatsServer) -> None:
    stack.pace(0.02)
    request = await under_way(stack)
    await asyncio.to_thread(nats_server.stop)
    await asyncio.to_thread(nats_server.start)
    assert text_of(await request) == ANSWER


async def test_a_bus_that_is_away_costs_no_attempt(make_stack: MakeStack, nats_server: NatsServer) -> None:
    stack = await make_stack(worker_timeout_s=1.5, frame_timeout_s=1.5, absence_s=2.0)
    stack.pace(0.02)
    running = await under_way(stack)
    stack.scheduler.workers = []
    waiting = asyncio.create_task(stack.chat(temperature=0))
    await until(lambda: len(stack.scheduler.submits) >= 2)
    await asyncio.to_thread(nats_server.stop)
    await asyncio.sleep(2.5)  # longer than any of those
    stack.scheduler.workers = stack.workers
    await asyncio.to_thread(nats_server.start)
    assert text_of(await running) == ANSWER and text_of(await waiting) == ANSWER
    attempts = {spec.ref.key: spec.ref.attempt for spec in stack.scheduler.submits}
    assert list(attempts.values()) == [1, 2], "only what nobody served is handed over"


async def test_a_failure_inside_a_stream_is_an_error_event(make_stack: MakeStack) -> None:
    stack = await make_stack(give_up_s=0.6, frame_timeout_s=5.0, worker_timeout_s=5.0)
    stack.pace(0.01)
    events: list[str] = []
    async with stack.http.stream(
        "POST", "/v1/chat/completions", json={**stack.body, "stream": True}
    ) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            events += [line] if line else []
            if len(events) == 3:
                for worker in stack.workers:
                    worker.frozen = True
    assert events[-1] == "data: [DONE]"
    error = json.loads(events[-2].removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "deadline_exceeded")


async def test_status_and_heartbeat(stack: Stack, connect_bus: Callable[..., asyncio.Future[Bus]]) -> None:
    bus = await connect_bus("tester", "tester-1")
    (status,) = await bus.gather(subjects.status("gateway"), Empty(), ServiceStatus, deadline_s=5, expected=1)
    assert status.details["url"] == stack.url and status.details["scheduler"] == "scheduler-0"
    assert {row["worker"] for row in status.details["workers"]} == {"worker-0", "worker-1"}
    await until(lambda: bool(stack.scheduler.gateways))
    assert stack.scheduler.gateways[0].gateway_id == "gateway-0"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_outlasts_the_grace_ends_with_a_word(stack: Stack, stream: bool) -> None:
    """Answers in progress used to break off in the middle of a chunked body when the gateway was ended."""
    stack.pace(0.05)
    request = asyncio.create_task(stack.chat(temperature=0, ignore_eos=True, stream=stream))
    await until(lambda: any(held.tokens for worker in stack.workers for held in worker.held.values()))
    await asyncio.wait_for(cancelled(stack.running), 8)
    await until(lambda: not any(worker.held for worker in stack.workers))
    assert stack.scheduler.cancelled
    reply = await request
    if stream:
        assert reply.status_code == 200
        *shown, last, done = reply.text.removesuffix("\n\n").split("\n\n")
        assert len(shown) > 5 and done == "data: [DONE]"
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert reply.status_code == 503 and reply.headers["retry-after"] == "2"
        error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "shutting_down")
    assert "send the request again" in error["message"]


async def test_what_ends_within_the_grace_is_complete(make_stack: MakeStack) -> None:
    stack = await make_stack(shutdown_grace_s=10.0)
    stack.pace(0.01)
    request = await under_way(stack)
    ending = asyncio.create_task(cancelled(stack.running))
    await until(lambda: stack.running.cancelling() > 0)
    ready = await stack.operator.get("/ready")
    assert "shutting down" in ready.json()["error"]["message"]
    assert (await stack.operator.get("/health")).status_code == 200 and text_of(await request) == ANSWER
    await asyncio.wait_for(ending, PATIENCE_S)


async def test_a_request_that_is_still_arriving_is_told_to_come_again(make_stack: MakeStack) -> None:
    stack = await make_stack(shutdown_grace_s=10.0)
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
    writer.write(f"{head}content-length: 100\r\n\r\n{{".encode())
    await asyncio.sleep(0.1)
    ending = asyncio.create_task(cancelled(stack.running))
    reply = await asyncio.wait_for(reader.read(), PATIENCE_S)
    assert reply.startswith(b"HTTP/1.1 503 ") and b'"shutting_down"' in reply
    writer.close()
    await asyncio.wait_for(ending, PATIENCE_S)


@asynccontextmanager
async def process_of(port: int, *flags: str, probe: str) -> AsyncIterator[Process]:
    """A gateway as a process, once it answers the probe."""
    command = [sys.executable, "-m", "services.gateway", "--port", str(port), "--operator-port", "0", *flags]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}")
        async with client, asyncio.timeout(STACK_PATIENCE_S):
            while True:
                with contextlib.suppress(httpx.ConnectError):
                    if (await client.get(probe)).status_code == 200:
                        break
                await asyncio.sleep(0.05)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_sigterm_to_the_process_ends_a_stream_with_a_word(
    make_stack: MakeStack, nats_server: NatsServer, model_folder: Path
) -> None:
    """As the above, with everything between the signal and the socket."""
    stack = await make_stack()
    stack.pace(0.05)
    await cancelled(stack.running)
    flags = ["--model", str(model_folder), "--served-name", MODEL, "--bus.url", nats_server.url]
    flags += ["--shutdown-grace-s", "0.5", "--api-key-sha256"]
    flags += [json.dumps([hashlib.sha256(KEY.encode()).hexdigest()])]
    async with process_of(stack.port, *flags, probe="/ready") as process:
        request = asyncio.create_task(stack.chat(temperature=0, ignore_eos=True, stream=True))
        await until(lambda: any(held.tokens for worker in stack.workers for held in worker.held.values()))
        process.send_signal(signal.SIGTERM)
        text = (await request).text
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
        assert '"shutting_down"' in text and text.endswith("data: [DONE]\n\n")


async def test_it_runs_alone_as_a_process(nats_server: NatsServer, model_folder: Path) -> None:
    port = free_port()
    flags = ["--model", str(model_folder), "--bus.url", nats_server.url]
    async with process_of(port, *flags, probe="/health") as process:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            ready = await client.get("/ready")
            assert ready.status_code == 503
            assert "no scheduler has announced itself" in ready.json()["error"]["message"]
            assert (await client.get("/v1/models")).status_code == 401
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0 and process.stderr is not None
        lines = [json.loads(line) for line in (await process.stderr.read()).splitlines()]
        assert {line["level"] for line in lines} == {"info"}


def test_the_hot_path_runs_inline() -> None:
    """A handler that is no coroutine runs in the bus's read loop."""
    assert not any(iscoroutinefunction(getattr(Sessions, handler.method)) for handler in HANDLERS)
    assert TokenDelta.__struct_config__.array_like


async def test_only_who_was_given_a_request_can_answer_it(stack: Stack, connect_bus: ConnectBus) -> None:
    """One that knows its name (from a heartbeat) and speaks in its own changes nothing."""
    evil = await connect_bus("worker", "worker-evil")
    end = (66, FinishReason.STOP)
    stack.pace(0.02)
    request = await under_way(stack, tokens=1)
    while not request.done():
        for held in [held for worker in stack.workers for held in worker.held.values()]:
            ref = held.spec.ref
            for first in range(len(held.tokens) + 1):
                delta = TokenDelta(ref.request_id, ref.choice, ref.attempt, first, end[:1], end[1])
                frame = TokenFrame("worker-evil", evil.incarnation, (delta,))
                await evil.publish(subjects.tokens(held.spec.gateway_id, "worker-evil"), frame)
            listed = msgspec.structs.replace(holder(stack)._listed(held), proof=b"guessed")
            report = worker_report("worker-evil", incarnation=evil.incarnation, sequences=(listed,))
            await evil.publish(subjects.worker_reported("worker-evil"), report)
        await asyncio.sleep(0.005)
    assert text_of(await request) == ANSWER
    assert len(stack.scheduler.submits) == 1, "nobody had to begin anew"


async def test_an_end_nobody_waits_for_is_acknowledged_and_a_run_cancelled(stack: Stack) -> None:
    request = await under_way(stack)
    await request
    spec, worker = stack.scheduler.submits[0], stack.workers[0]
    worker.computing.clear()
    worker.held[("req_old", 0)] = Held(spec, [1, 2])
    await until(lambda: spec.ref in worker.cancelled)
    await until(lambda: spec.ref in stack.scheduler.cancelled)
    ended = worker._listed(Held(spec, [1, 2]))
    assert ended.state is SequenceState.DECODING
