"""Two gateways' users on a stack's nats-server, and a worker that computes for one of them.

Keeps a gateway that was taken over from reading, ending, lengthening or having forgotten another's answers:
it hears their names in every heartbeat."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from services.worker.assembly import make_engine
from services.worker.core.sampling import Sampled
from services.worker.engine.contract import Row
from services.worker.engine.engine import TorchEngine
from services.worker.service import Worker
from shared import subjects
from shared.bus import Bus, Listener
from shared.errors import ForeignSequence, InvalidMessage, PermissionRefused
from shared.messages.base import Empty, Message
from shared.messages.reports import SequenceState, ServiceStatus, WorkerReported
from shared.messages.sequence import FinishReason, SequenceRef
from shared.messages.tokens import ExtendSequence, FetchedTokens, FetchTokens, TokenDelta, TokenFrame
from tests.patience import PATIENCE_S, until
from tests.services.stack.secured import secured_server
from tests.services.worker.test_service import worker_config
from tests.shared.messages.builders import acknowledging, cancelling, decode, plan, prefill, ref, spec

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TOKENS = 30
WORKER = "worker-0"


class User:
    """One instance's user on the bus: what it hears of the worker, and what it tells it."""

    def __init__(self, bus: Bus) -> None:
        self.bus, self.name = bus, bus.instance
        self.deltas, self.reported = list[TokenDelta](), list[WorkerReported]()
        self.on_reported = self.reported.append
        self.on_frame = lambda frame: self.deltas.extend(frame.deltas)

    async def listen(self) -> None:
        frames = Listener(subjects.tokens.to(self.name), TokenFrame, "on_frame")
        reports = Listener(subjects.ANY_WORKER_REPORTED, WorkerReported, "on_reported")
        await self.bus.attach((frames, reports), self)

    def tokens(self, name: SequenceRef) -> list[int]:
        return [token for one in self.deltas if one.request_id == name.request_id for token in one.tokens]

    def end(self, name: SequenceRef) -> FinishReason | None:
        reasons = [delta.finish_reason for delta in self.deltas if delta.request_id == name.request_id]
        return next((reason for reason in reasons if reason is not None), None)

    def listed(self) -> dict[str, SequenceState]:
        return {one.ref.request_id: one.state for one in self.reported[-1].sequences}

    async def fetch(self, name: SequenceRef, sender: str = "") -> TokenDelta | None:
        question = FetchTokens(ref=name, sender=sender or self.name, first_index=0)
        subject = subjects.worker_fetch(WORKER, self.name)
        return (await self.bus.request(subject, question, FetchedTokens, deadline_s=PATIENCE_S)).delta

    async def say_everything(self, name: SequenceRef) -> int:
        """Whatever a gateway can tell a worker of a sequence; in how many messages."""
        me, higher = self.name, msgspec.structs.replace(name, attempt=name.attempt + 5)
        late = ExtendSequence(ref=name, sender=me, first_index=0, tokens=tuple(range(40)))
        said: list[tuple[str, Message]] = [
            (subjects.worker_extend(WORKER, me), late),
            (subjects.worker_acknowledge(WORKER, me), acknowledging(name, sender=me)),
            (subjects.worker_cancel(WORKER, me), cancelling(name, me)),
            (subjects.worker_cancel(WORKER, me), cancelling(higher, me)),
        ]
        for subject, message in said:
            await self.bus.publish(subject, message)
        return len(said)


class World:
    """A worker, the scheduler's user, and those of two gateways."""

    def __init__(self, scheduler: Bus, operator: Bus, owner: User, stranger: User) -> None:
        self.scheduler, self.operator = scheduler, operator
        self.owner, self.stranger = owner, stranger
        self._seq = 0

    async def start(self, name: SequenceRef, gateway: User) -> None:
        """One plan that computes the whole answer."""
        self._seq += 1
        starts = (spec(name, PROMPT, max_tokens=TOKENS, gateway_id=gateway.name),)
        items: dict[str, Any] = {"prefills": (prefill(name, 0, len(PROMPT), blocks=12),)}
        items |= {"starts": starts, "decodes": (decode(name, 12),)}
        whole = plan(self._seq, steps=TOKENS, valid_for_s=PATIENCE_S, **items)
        await self.scheduler.publish(subjects.worker_plan(WORKER), whole)

    async def ignored(self) -> int:
        """Commands that the worker was not to obey, as it counts them."""
        subject = subjects.instance_status("worker", WORKER)
        answer = await self.operator.request(subject, Empty(), ServiceStatus, deadline_s=PATIENCE_S)
        return int(answer.details["foreign_commands"])


@pytest_asyncio.fixture
async def world(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """Its worker takes its time: what is said of an answer arrives while it is computed."""
    compute = TorchEngine.step

    def slowly(engine: TorchEngine, rows: Sequence[Row]) -> Sequence[Sampled | None]:
        time.sleep(0.01)
        return compute(engine, rows)

    monkeypatch.setattr(TorchEngine, "step", slowly)
    config = worker_config(model_folder)
    async with AsyncExitStack() as stack:
        access = await stack.enter_async_context(secured_server(tmp_path / "run", users=("gateway-1",)))

        async def connect(user: str) -> Bus:
            service = user.partition("-")[0]
            settings = access.config(user, connect_timeout_s=15.0, drain_timeout_s=0.5)
            registry = CollectorRegistry()
            bus = await Bus.connect(settings, service=service, instance=user, registry=registry)
            stack.push_async_callback(bus.close)
            return bus

        users = [User(await connect(name)) for name in ("gateway-0", "gateway-1")]
        for user in users:
            await user.listen()
        made = World(await connect("scheduler-0"), await connect(subjects.OPERATOR), *users)
        worker = Worker(await connect(WORKER), config, make_engine(config))
        serving = asyncio.create_task(worker.serve())
        try:
            await until(lambda: bool(made.owner.reported) or serving.done())
            yield made
        finally:
            serving.cancel()
            await asyncio.wait({serving}, timeout=PATIENCE_S)


async def test_what_another_gateway_says_of_an_answer_changes_nothing_of_it(world: World) -> None:
    """While it is computed, and while its end waits to be acknowledged. The owner's own word counts."""
    alone, name = ref("req_alone"), ref("req_1")
    owner, stranger = world.owner, world.stranger
    await world.start(alone, owner)
    await until(lambda: owner.end(alone) is FinishReason.LENGTH)
    said = await stranger.say_everything(alone)
    await world.start(name, owner)
    await until(lambda: bool(owner.tokens(name)))
    while owner.end(name) is None:
        said += await stranger.say_everything(name)
        with pytest.raises(ForeignSequence, match="only the gateway that submitted it"):
            await stranger.fetch(name)
        await asyncio.sleep(0.02)
    assert said > 12, "something was said while it was computed"
    said += await stranger.say_everything(name)
    assert owner.tokens(name) == owner.tokens(alone) and len(owner.tokens(name)) == TOKENS
    assert owner.end(name) is FinishReason.LENGTH and stranger.deltas == []
    fetched = await owner.fetch(name)
    assert fetched is not None and list(fetched.tokens) == owner.tokens(name)
    await until(lambda: owner.listed() == {"req_alone": SequenceState.ENDED, "req_1": SequenceState.ENDED})
    assert await world.ignored() == said
    await owner.say_everything(name)
    await until(lambda: set(owner.listed()) == {"req_alone"})


async def test_a_cancel_ahead_of_the_start_is_for_its_sender_s_sequences_alone(world: World) -> None:
    name = ref("req_1")
    await world.stranger.say_everything(name)
    await world.stranger.fetch(name)
    await world.start(name, world.owner)
    await until(lambda: world.owner.end(name) is FinishReason.LENGTH)
    assert len(world.owner.tokens(name)) == TOKENS


async def test_nobody_asks_in_another_s_name(world: World) -> None:
    """Neither on its subject, which the server refuses, nor on its own, where the worker compares the two."""
    name, me = ref("req_1"), world.stranger.name
    await world.start(name, world.owner)
    await until(lambda: len(world.owner.tokens(name)) > 2)
    for sender in ("gateway-0", "scheduler-0"):
        question = FetchTokens(ref=name, sender=sender, first_index=0)
        with pytest.raises(PermissionRefused):
            await world.stranger.bus.request(
                subjects.worker_fetch(WORKER, sender), question, FetchedTokens, deadline_s=PATIENCE_S
            )
        with pytest.raises(PermissionRefused):
            await world.stranger.bus.publish(subjects.worker_cancel(WORKER, sender), cancelling(name, sender))
        with pytest.raises(InvalidMessage, match="calls itself"):
            await world.stranger.fetch(name, sender)
        await world.stranger.bus.publish(subjects.worker_cancel(WORKER, me), cancelling(name, sender))
    await until(lambda: world.owner.end(name) is FinishReason.LENGTH)
    assert len(world.owner.tokens(name)) == TOKENS
