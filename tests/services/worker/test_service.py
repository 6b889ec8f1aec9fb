"""A worker on a real nats-server: what schedulers and gateways see of it."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import pytest_asyncio

from services.worker.assembly import make_engine
from services.worker.config import WorkerConfig
from services.worker.core.sampling import Sampled
from services.worker.core.settings import PrefixCacheConfig
from services.worker.engine.contract import Row
from services.worker.engine.engine import TorchEngine
from services.worker.kv.store import CacheableEngine
from services.worker.peers.transport.base import Peer
from services.worker.peers.transport.plane import PeerAddress, Plane
from services.worker.peers.transport.tcp import TcpTransport
from services.worker.service import Worker
from shared import subjects
from shared.blocks import HASH_BYTES, chain, root
from shared.bus import Bus, Listener
from shared.errors import InternalError, InvalidRequest
from shared.messages.base import Message
from shared.messages.commands import TakeSnapshot
from shared.messages.lending import AskTicket, BorrowReply, BulkTicket, Refusal
from shared.messages.plans import BatchPlan, WorkerStepped
from shared.messages.prefixes import FindPrefixes, ForgetPrefixes, PrefixesForgotten, WorkerPrefixes
from shared.messages.reports import SequenceState, WorkerReported
from shared.messages.sequence import FinishReason, Sampling, SequenceRef, pack_tokens
from shared.messages.tokens import FetchedTokens, FetchTokens, TokenDelta, TokenFrame
from tests.conftest import ConnectBus
from tests.patience import PATIENCE_S
from tests.services.worker.peers.lending.builders import borrow
from tests.services.worker.test_engine_thread import CountingEngine
from tests.shared.messages.builders import acknowledging, cancelling, decode, prefill, ref, spec

T = TypeVar("T")
A = TypeVar("A", bound=Message)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class Peers:
    """Scheduler and gateway in one: keeps what the worker says, sends it plans and commands."""

    def __init__(self, bus: Bus, epoch: int = 3) -> None:
        self.bus, self.epoch, self._seq = bus, epoch, 0
        self.frames, self.stepped = list[TokenFrame](), list[WorkerStepped]()
        self.reported, self.cached = list[WorkerReported](), list[WorkerPrefixes]()
        self.on_frame, self.on_stepped = self.frames.append, self.stepped.append
        self.on_reported, self.on_cached = self.reported.append, self.cached.append

    @property
    def deltas(self) -> list[TokenDelta]:
        return [delta for frame in self.frames for delta in frame.deltas]

    async def plan(self, *, epoch: int | None = None, **fields: Any) -> None:
        self._seq += 1
        plan = BatchPlan(epoch=epoch or self.epoch, seq=self._seq, **fields)
        await self.bus.publish(subjects.worker_plan("worker-0"), plan)

    async def start(self, request_id: str, steps: int, *, max_tokens: int = 64) -> SequenceRef:
        """One greedy sequence, its whole prompt and, in the same plan, `steps - 1` decodes."""
        made = ref(request_id)
        await self.start_with(made, Sampling(seed=1, max_tokens=max_tokens, temperature=0.0), steps)
        return made

    async def start_with(
        self, ref: SequenceRef, sampling: Sampling, steps: int, generated: Sequence[int] = ()
    ) -> None:
        start = msgspec.structs.replace(spec(ref, PROMPT, generated=list(generated)), sampling=sampling)
        chunk = prefill(ref, 0, len(PROMPT) + len(generated), blocks=20)
        await self.plan(steps=steps, starts=(start,), prefills=(chunk,), decodes=(decode(ref, 20),))

    async def ask(self, subject: str, question: Message, answer: type[A]) -> A:
        return await self.bus.request(subject, question, answer, deadline_s=PATIENCE_S)

    async def ended(self) -> None:
        """Until a sequence's last token is here."""
        await self.until(lambda: any(delta.finish_reason for delta in self.deltas))

    async def snapshot(self, epoch: int) -> WorkerReported:
        return await self.ask(subjects.worker_snapshot("worker-0"), TakeSnapshot(epoch=epoch), WorkerReported)

    async def fetch(self, ref: SequenceRef, first_index: int) -> TokenDelta | None:
        request = FetchTokens(ref=ref, sender="gateway-0", first_index=first_index)
        return (await self.ask(subjects.worker_fetch("worker-0", "gateway-0"), request, FetchedTokens)).delta

    async def until(self, find: Callable[[], T | None]) -> T:
        """What `find` finds, as soon as it finds something."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = find()
                if found:
                    return found
                await asyncio.sleep(0.005)

    async def fresh_report(self) -> WorkerReported:
        """The next heartbeat that began after this call."""
        await asyncio.sleep(0)
        seen = len(self.reported)
        return await self.until(lambda: self.reported[-1] if len(self.reported) >= seen + 2 else None)


@pytest_asyncio.fixture
async def peers(connect_bus: ConnectBus) -> Peers:
    bus = await connect_bus("tester", "peers-0")
    peers = Peers(bus)
    listeners = (
        Listener(subjects.tokens.to("gateway-0"), TokenFrame, "on_frame"),
        Listener(subjects.ANY_WORKER_STEPPED, WorkerStepped, "on_stepped"),
        Listener(subjects.ANY_WORKER_REPORTED, WorkerReported, "on_reported"),
        Listener(subjects.ANY_WORKER_CACHED, WorkerPrefixes, "on_cached"),
    )
    await bus.attach(listeners, peers)
    return peers


@pytest.fixture
def config(model_folder: Path) -> WorkerConfig:
    return worker_config(model_folder)


def worker_config(model: Path) -> WorkerConfig:
    sizes: dict[str, Any] = {"kv_blocks": 60, "block_tokens": 4, "heartbeat_s": 0.05}
    return WorkerConfig(instance="worker-0", model=str(model), host="here", **sizes)


@pytest_asyncio.fixture
async def worker_bus(connect_bus: ConnectBus, config: WorkerConfig, peers: Peers) -> AsyncIterator[Bus]:
    """A serving worker; its bus can be disconnected by tests that want to."""
    bus = await connect_bus("worker", "worker-0")
    async with serving(bus, config, peers):
        yield bus


class serving:
    """A worker that serves inside the `async with`."""

    def __init__(self, bus: Bus, config: WorkerConfig, peers: Peers) -> None:
        self._bus, self._config, self._peers = bus, config, peers

    async def __aenter__(self) -> None:
        worker = Worker(self._bus, self._config, make_engine(self._config))
        self._task = asyncio.create_task(worker.serve())
        await self._peers.until(lambda: self._peers.reported or self._task.done())

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=PATIENCE_S)
        assert self._task.cancelled()


async def test_a_plan_starts_a_sequence_and_its_tokens_arrive_in_order(worker_bus: Bus, peers: Peers) -> None:
    ref = await peers.start("req_1", steps=6, max_tokens=6)
    ended = await peers.until(lambda: next((s for s in peers.stepped if s.ended), None))
    await peers.ended()
    assert [delta.first_index for delta in peers.deltas] == [0, 1, 2, 3, 4, 5]
    assert all(len(delta.tokens) == 1 and delta.request_id == "req_1" for delta in peers.deltas)
    assert peers.deltas[-1].finish_reason is FinishReason.LENGTH
    assert (ended.ended[0].ref, ended.ended[0].generated_tokens) == (ref, 6)
    assert [stepped.seq for stepped in peers.stepped] == list(range(1, len(peers.stepped) + 1))
    assert [stepped.prefilled_tokens for stepped in peers.stepped][:2] == [8, 0]
    assert ended.free_blocks == 60 and ended.plan_over


async def test_an_end_is_listed_until_acknowledged(worker_bus: Bus, peers: Peers) -> None:
    ref = await peers.start("req_1", steps=4, max_tokens=4)
    await peers.ended()
    report = await peers.fresh_report()
    assert [(s.ref, s.state, s.generated_tokens) for s in report.sequences] == [(ref, SequenceState.ENDED, 4)]
    assert report.sequences[0].finish_reason is FinishReason.LENGTH
    await peers.bus.publish(subjects.worker_acknowledge("worker-0", "gateway-0"), acknowledging(ref))
    await peers.until(lambda: not peers.reported[-1].sequences)


async def test_penalties_and_logprobs_go_on_over_a_resume(worker_bus: Bus, peers: Peers) -> None:
    penalties: dict[str, Any] = {"repetition_penalty": 1.2, "frequency_penalty": 0.8, "presence_penalty": 0.5}
    rules: dict[str, Any] = {"min_p": 0.001, "min_tokens": 20, "end_token_ids": tuple(range(0, 97, 3))}
    sampling = Sampling(seed=5, max_tokens=24, temperature=1.5, top_logprobs=2, **penalties, **rules)
    whole = ref("req_1")
    await peers.start_with(whole, sampling, steps=24)
    await peers.ended()
    tokens = [token for delta in peers.deltas for token in delta.tokens]
    logprobs = [each for delta in peers.deltas for each in delta.logprobs]
    assert len(tokens) == len(logprobs) >= 20 and all(len(each.top) == 2 for each in logprobs)
    missed = await peers.fetch(whole, 7)
    assert missed is not None and (list(missed.tokens), list(missed.logprobs)) == (tokens[7:], logprobs[7:])

    resumed = ref("req_1", 2)
    await peers.start_with(resumed, sampling, steps=24, generated=tokens[:11])
    await peers.until(lambda: any(d.finish_reason for d in peers.deltas if d.attempt == 2))
    later = [delta for delta in peers.deltas if delta.attempt == 2]
    assert later[0].first_index == 11
    assert [token for delta in later for token in delta.tokens] == tokens[11:]
    chosen = [each.chosen for delta in later for each in delta.logprobs]
    assert chosen == pytest.approx([each.chosen for each in logprobs[11:]], abs=1e-4)


async def test_a_cancel_frees_blocks_within_a_step(
    worker_bus: Bus, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = TorchEngine.step

    def slowly(engine: TorchEngine, rows: Sequence[Row]) -> Sequence[Sampled | None]:
        time.sleep(0.05)  # the answer is not over before the cancel is there
        return compute(engine, rows)

    monkeypatch.setattr(TorchEngine, "step", slowly)
    ref = await peers.start("req_1", steps=70)
    await peers.until(lambda: len(peers.deltas) >= 2)
    await peers.bus.publish(subjects.worker_cancel("worker-0", "gateway-0"), cancelling(ref))
    gone = await peers.until(lambda: next((s for s in peers.stepped if s.ended or s.plan_over), None))
    assert gone.free_blocks == 60
    assert gone.ended[0].finish_reason is FinishReason.CANCELLED
    assert (await peers.fresh_report()).sequences == ()
    before = len(peers.deltas)
    await peers.start("req_1", steps=2)
    await peers.until(lambda: any(stepped.skipped for stepped in peers.stepped))
    assert len(peers.deltas) == before


async def test_a_plan_that_comes_in_a_long_step_has_reached_the_worker(
    worker_bus: Bus, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a step that takes longer than a scheduler is willing to wait costs a snapshot each time."""
    compute, under_way, go_on = TorchEngine.step, threading.Event(), threading.Event()

    def held(engine: TorchEngine, rows: Sequence[Row]) -> Sequence[Sampled | None]:
        under_way.set()
        assert go_on.wait(PATIENCE_S)
        return compute(engine, rows)

    ref = await peers.start("req_1", steps=1)
    await peers.until(lambda: any(report.plan_seq == 1 for report in peers.reported))
    monkeypatch.setattr(TorchEngine, "step", held)
    await peers.plan(decodes=(decode(ref, 20),))
    await peers.until(under_way.is_set)
    await peers.plan(decodes=(decode(ref, 20),))
    try:
        await peers.until(lambda: any(report.plan_seq == 3 for report in peers.reported))
    finally:
        go_on.set()
    await peers.until(lambda: len(peers.stepped) == 3)
    snapshot = await peers.snapshot(epoch=peers.epoch)
    assert (snapshot.epoch, snapshot.plan_seq) == (peers.epoch, 0)


async def test_a_broken_engine_ends_the_worker(
    connect_bus: ConnectBus, config: WorkerConfig, peers: Peers
) -> None:
    bus = await connect_bus("worker", "worker-0")
    serving_task = asyncio.create_task(Worker(bus, config, CountingEngine(broken=True)).serve())
    await peers.until(lambda: peers.reported)
    started: list[SequenceRef] = []
    for name in ("req_1", "req_2"):
        started.append(await peers.start(name, steps=1))
        await peers.until(lambda: len(peers.deltas) >= len(started))
    await peers.start("req_3", steps=1)
    with pytest.raises(InternalError, match="failed altogether"):
        await asyncio.wait_for(serving_task, PATIENCE_S)
    assert [delta.finish_reason for delta in peers.deltas] == [FinishReason.ERROR] * 2


async def test_another_worker_dials_where_it_listens_with_a_ticket(
    connect_bus: ConnectBus, worker_bus: Bus, peers: Peers
) -> None:
    addresses = (await peers.fresh_report()).bulk_addresses
    assert set(addresses) == {"shm", "tcp"}
    asker = await connect_bus("worker", "worker-1")
    own = Peer("worker-1", asker.incarnation)
    question = AskTicket(worker_id=own.worker_id, incarnation=own.incarnation)

    async def issue() -> bytes:
        subject = subjects.worker_dial("worker-0", "worker-1")
        return (await asker.request(subject, question, BulkTicket, deadline_s=PATIENCE_S)).ticket

    there = PeerAddress(Peer("worker-0", worker_bus.incarnation), "elsewhere", addresses)
    link = await Plane(own, "here", [TcpTransport()]).connect(there, issue, deadline_s=10.0)
    assert link.transport == "tcp"
    with pytest.raises(InvalidRequest, match="nowhere"):
        await asyncio.to_thread(link.ask, "nowhere", deadline_s=10.0)
    link.close()


async def test_what_is_cached_is_told_and_can_be_asked_for(worker_bus: Bus, peers: Peers) -> None:
    await peers.start("a", steps=3, max_tokens=3)
    told = await peers.until(lambda: peers.cached[0] if peers.cached else None)
    names = chain(root(peers.reported[-1].fingerprint), pack_tokens(PROMPT), 4)
    assert told.seq == 1 and told.added.startswith(b"".join(names)) and set(told.tiers) == {0}
    question = FindPrefixes(incarnation=told.incarnation)
    answer = await peers.ask(subjects.worker_prefixes("worker-0"), question, WorkerPrefixes)
    assert answer.added.startswith(told.added) and answer.seq >= 1


async def test_an_operator_empties_the_cache_through_a_gateway(worker_bus: Bus, peers: Peers) -> None:
    await peers.start("a", steps=3, max_tokens=3)
    told = await peers.until(lambda: peers.cached[0] if peers.cached else None)
    await peers.ended()
    subject, command = subjects.worker_forget("worker-0", "gateway-0"), ForgetPrefixes(sender="gateway-0")
    answer = await peers.ask(subject, command, PrefixesForgotten)
    assert answer.blocks >= len(told.tiers) > 0
    gone = await peers.until(lambda: peers.cached[-1].removed)
    assert told.added[:HASH_BYTES] in [gone[at : at + HASH_BYTES] for at in range(0, len(gone), HASH_BYTES)]


async def test_without_a_prefix_cache_a_worker_lends_to_the_same_kv_only(
    connect_bus: ConnectBus, config: WorkerConfig, peers: Peers
) -> None:
    """Its KV has a name with and without one. Nameless, any worker's passed for it: blocks of another size
    were attended to, and most of the tokens were wrong."""
    bus = await connect_bus("worker", "worker-0")
    debtor = await connect_bus("worker", "worker-1")
    no_cache = config.model_copy(update={"prefix_cache": PrefixCacheConfig(enabled=False)})
    others = [make_engine(no_cache.model_copy(update={"block_tokens": size})) for size in (4, 8)]
    prints = [b"", *(engine.fingerprint for engine in others if isinstance(engine, CacheableEngine))]
    async with serving(bus, no_cache, peers):
        report = await peers.fresh_report()
        assert not report.caches_prefixes and report.fingerprint == prints[1] != prints[2]
        refusals, subject = [], subjects.worker_borrow("worker-0", "worker-1")
        for number, each in enumerate(prints):
            asked = borrow("worker-1", request=number, blocks=2, fingerprint=each)
            answer = await debtor.request(subject, asked, BorrowReply, deadline_s=PATIENCE_S)
            refusals.append(answer.refusal)
    assert refusals == [Refusal.OTHER_KV, None, Refusal.OTHER_KV]
