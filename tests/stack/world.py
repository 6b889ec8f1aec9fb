"""The three cores that a request meets (gateway stream, scheduler, worker) in one process, on virtual time.

Nothing of them is replaced; only bus and engine are. The bus is `virtual_net`; the engine's token is a
function of sequence and index, so that every answer is known beforehand.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from services.gateway.core.effects import Acknowledge, Cancel, Extend, Fetch, StreamTiming, Submit
from services.gateway.core.effects import StreamEffect as StreamEffect
from services.gateway.core.peers import SchedulerView, WorkerTable
from services.gateway.core.stream import Stream
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.effects import (
    AskPlacement,
    AskPull,
    AskSnapshot,
    AskTokens,
    CancelAtWorker,
    PublishMoved,
    PublishPrepared,
    PublishWorkerLost,
    SendPlan,
)
from services.scheduler.core.effects import Effect as SchedulerEffect
from services.scheduler.core.rules import Rules
from services.scheduler.policy.contract import PolicyFactory
from services.scheduler.policy.first_come import VllmPolicy
from services.worker.core.prefixes import Prefixes
from services.worker.core.reports import Identity
from services.worker.core.sequences import SequenceLimits, SequenceTable
from services.worker.core.step_work import StepWork
from services.worker.core.steps import StepCore, StepEffects
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.borrowed_pool import OwnPool, Pool
from services.worker.kv.core.load_policy import CostGate
from services.worker.kv.core.prefix_cache import PrefixCache, Tiers
from shared.errors import InvalidRequest
from shared.messages.commands import CancelSequence, PlacementItem, TakeSnapshot
from shared.messages.moves import (
    BlocksPulled,
    MoveMode,
    MovePrepared,
    PullBlocks,
    SequenceMove,
    SequenceMoved,
)
from shared.messages.reports import GatewayReported, SchedulerAnnounced, WorkerReported
from shared.messages.sequence import Sampling, SequenceKey, SequenceSpec, pack_tokens
from shared.messages.tokens import AcknowledgeEnds, ExtendSequence, FetchTokens, TokenFrame
from tests.stack.actors import END_TOKEN, FINGERPRINT, Wanted, WorkerProcess, pulled, true_tokens
from tests.virtual_net import Process, VirtualNet

MODEL = "m"
TICK_S, BEAT_S, REPORT_S = 0.05, 0.25, 0.5


class World(VirtualNet):
    """One gateway, one scheduler, some workers. `run` returns when every stream has ended, or time is up."""

    def __init__(
        self,
        seed: int,
        wanted: list[Wanted],
        *,
        workers: int,
        kv_blocks: int,
        loss: float,
        cached: bool = False,
        policy: PolicyFactory = VllmPolicy,
        rules: Rules | None = None,
    ) -> None:
        """`cached`: blocks outlive their sequences, on the device alone."""
        super().__init__(seed, loss)
        self.cached, self.policy, self.rules = cached, policy, rules or Rules()
        self.choose: Callable[[list[str | None]], str | None] = self.random.choice
        """Placement: of these workers."""
        self.moved: list[SequenceMoved] = []
        self.wanted = {(f"r{number}", 0): one for number, one in enumerate(wanted)}
        self.kv_blocks = kv_blocks
        self.streams: dict[SequenceKey, Stream] = {}
        self.table, self.view = WorkerTable(MODEL, 3.0), SchedulerView(3.0)
        self.gateway = Process("g")
        self.scheduler = Process("s")
        self.workers = {f"w{number}": WorkerProcess(f"w{number}") for number in range(workers)}
        self._epoch = 0
        self.caches: dict[str, PrefixCache] = {}
        for worker in self.workers.values():
            self.start_worker(worker)
        self.start_scheduler()
        self.every(TICK_S, self._gateway_tick)
        self.every(REPORT_S, self._gateway_report)

    @property
    def is_over(self) -> bool:
        """Every answer is there, or has failed."""
        return len(self.streams) == len(self.wanted) and not any(s.is_open for s in self.streams.values())

    def revive(self, process: Process) -> None:
        if isinstance(process, WorkerProcess):
            self.start_worker(process)
        else:
            self.start_scheduler()

    # --- the gateway

    def submit(self, key: SequenceKey) -> None:
        timing = StreamTiming(give_up_s=500.0)
        self.streams[key] = Stream(key, timing, self.now_s, b"secret")
        self._apply(key, self.streams[key].submit(self.now_s))

    def _apply(self, key: SequenceKey, effects: tuple[StreamEffect, ...]) -> None:
        for effect in effects:
            self._carry_out(key, effect)
        self.streams[key].check_integrity()

    def _carry_out(self, key: SequenceKey, effect: StreamEffect) -> None:
        match effect:
            case Submit(attempt, serial):
                stream, spec = self.streams[key], self._spec(key, attempt)
                self.ask(
                    self.gateway,
                    self.scheduler,
                    lambda: self._submitted(spec),
                    lambda _: self._apply(key, stream.on_submitted(serial, self.now_s)),
                    lambda error: self._apply(key, stream.on_submit_failed(serial, error, self.now_s)),
                )
            case Fetch(worker_start, ref, first_index):
                stream, worker = self.streams[key], self.workers[worker_start[0]]
                question = FetchTokens(ref=ref, first_index=first_index)
                self.ask(
                    self.gateway,
                    worker,
                    lambda: worker.core.on_fetch(question),
                    lambda found: self._apply(
                        key, stream.on_fetched(ref, found.delta, worker_start, self.now_s)
                    ),
                    lambda _: self._apply(key, stream.on_fetch_failed(ref, self.now_s)),
                )
            case Acknowledge(worker_id, ref):
                self._to_worker(
                    "g", worker_id, lambda core: core.on_acknowledge(AcknowledgeEnds(refs=(ref,)), self.now_s)
                )
            case Extend(worker_id, ref, first_index, tokens):
                late = ExtendSequence(ref=ref, first_index=first_index, tokens=tokens)
                self._to_worker("g", worker_id, lambda core: core.on_extend(late))
            case Cancel(ref, worker_id, is_final):
                command = CancelSequence(ref=ref)
                if worker_id is not None:
                    self._to_worker("g", worker_id, lambda core: core.on_cancel(command, self.now_s))
                if is_final:
                    self.send("g", self.scheduler, lambda: self._feed("on_cancel", command))

    def _spec(self, key: SequenceKey, attempt: int) -> SequenceSpec:
        wanted, stream = self.wanted[key], self.streams[key]
        return SequenceSpec(
            ref=msgspec.structs.replace(stream.ref, attempt=attempt),
            gateway_id="g",
            gateway_incarnation=1,
            prompt=pack_tokens([wanted.word] * wanted.prompt_tokens),
            sampling=Sampling(seed=0, max_tokens=wanted.max_tokens, end_token_ids=(END_TOKEN,)),
            generated=pack_tokens(stream.tokens),
            open_tokens=stream.open_tokens(wanted.max_tokens),
            capability=stream.capability,
        )

    def _gateway_tick(self) -> None:
        for start in self.table.on_tick(self.now_s):
            self._lose(start, {})
        for key, stream in self.streams.items():
            self._apply(key, stream.on_tick(self.now_s))

    def _gateway_report(self) -> None:
        event = GatewayReported(gateway_id="g", incarnation=1)
        self.send("g", self.scheduler, lambda: self._feed("on_gateway_reported", event))
        for name in self.workers:
            self._to_worker("g", name, lambda core: core.on_gateway(event, self.now_s))

    def _lose(self, start: tuple[str, int], attempts: dict[SequenceKey, int]) -> None:
        for key, stream in self.streams.items():
            self._apply(key, stream.on_worker_lost(start, attempts.get(key), self.now_s))

    def _on_frame(self, frame: TokenFrame) -> None:
        for delta in frame.deltas:
            key = (delta.request_id, delta.choice)
            if delta.attempt == self.streams[key].attempt:
                start = (frame.worker_id, frame.incarnation)
                self._apply(key, self.streams[key].on_delta(delta, start, self.now_s))

    def _on_beat(self, report: WorkerReported) -> None:
        start = (report.worker_id, report.incarnation)
        ended_run = self.table.on_report(report, self.now_s)
        if ended_run is not None:
            self._lose(ended_run, {})
        for listed in report.sequences:
            if not listed.gateway_id:
                continue
            key = listed.ref.key
            self._apply(key, self.streams[key].on_report(listed, start, self.now_s))

    def _on_announced(self, event: SchedulerAnnounced) -> None:
        if self.view.on_announced(event, self.now_s):
            for key, stream in self.streams.items():
                self._apply(key, stream.submit(self.now_s))

    # --- the scheduler

    def start_scheduler(self) -> None:
        self.scheduler.alive = True
        self._epoch += 1
        self.core = SchedulerCore(self.rules, self.policy, self._epoch, self.now_s)
        self.every(TICK_S, lambda: self._feed("on_tick"), self.scheduler)
        self.every(REPORT_S, self._announce, self.scheduler)

    def _announce(self) -> None:
        event = SchedulerAnnounced(
            scheduler_id="s", incarnation=self.scheduler.life + 1, epoch=self.core.epoch, policy="vllm"
        )
        self.send("s", self.gateway, lambda: self._on_announced(event))

    def _submitted(self, spec: SequenceSpec) -> None:
        _, effects = self.core.on_submit(spec, self.now_s)
        self._carry_out_plans(effects)

    def _feed(self, event: str, *details: Any) -> None:
        self._carry_out_plans(getattr(self.core, event)(*details, self.now_s))
        self.core.check_integrity()

    def _carry_out_plans(self, effects: list[SchedulerEffect]) -> None:
        for effect in effects:
            self._carry_out_plan(effect)

    def _carry_out_plan(self, effect: SchedulerEffect) -> None:
        match effect:
            case SendPlan(worker_id, plan):
                self._to_worker("s", worker_id, lambda core: core.on_plan(plan, self.now_s))
            case CancelAtWorker(worker_id, command):
                self._to_worker("s", worker_id, lambda core: core.on_cancel(command, self.now_s))
            case PublishWorkerLost(lost):
                start, attempts = (lost.worker_id, lost.incarnation), {r.key: r.attempt for r in lost.refs}
                self.send("s", self.gateway, lambda: self._lose(start, attempts))
            case AskTokens(worker_id, ref):
                asked = self.workers[worker_id]
                self.ask(
                    self.scheduler,
                    asked,
                    lambda: asked.core.on_fetch(FetchTokens(ref=ref, first_index=0)).delta,
                    lambda delta: self._feed("on_tokens", ref, None if delta is None else delta.tokens),
                    lambda _: self._feed("on_tokens", ref, None),
                )
            case AskPull(worker_id, ref, order):
                target, source = self.workers[worker_id], self.workers[order.source]
                self.ask(
                    self.scheduler,
                    target,
                    lambda: self._pull(source, target, order),
                    lambda pulled: self._feed("on_pulled", ref, pulled),
                    lambda _: self._feed("on_pulled", ref, None),
                )
            case PublishPrepared(prepared):
                self.send("s", self.gateway, lambda: self._on_prepared(prepared))
            case PublishMoved(moved):
                self.moved.append(moved)
            case AskPlacement(question, items, excluded):
                answer = self.place(items, excluded)
                self.at(self.now_s + 0.002, self._while_it_lives("on_placed", question, answer))
            case AskSnapshot(worker_id, epoch, _):
                worker = self.workers[worker_id]
                self.ask(
                    self.scheduler,
                    worker,
                    lambda: self._snapshot(worker, TakeSnapshot(epoch=epoch)),
                    lambda snapshot: self._feed("on_snapshot", snapshot),
                    lambda _: self._feed("on_snapshot_failed", worker_id),
                )

    def place(self, items: tuple[PlacementItem, ...], excluded: tuple[str, ...]) -> tuple[str | None, ...]:
        """Placement's answer to one question."""
        open_: list[str | None] = [name for name in self.workers if name not in excluded]
        return tuple(self.choose(open_ or [None]) for _ in items)

    def step_s(self, work: StepWork) -> float:
        """How long the engine takes."""
        return self.random.choice((0.003, 0.005, 0.02))

    def move(self, number: int) -> None:
        """Orders a move of some sequence that runs to the worker after its own."""
        running = sorted(
            (listed.ref.key, worker.name, listed)
            for worker in self.workers.values()
            if worker.alive
            for listed in worker.core.report(self.now_s).sequences
            if listed.gateway_id and listed.finish_reason is None
        )
        if not running or not self.scheduler.alive or self.scheduler.frozen:
            return
        _, name, listed = running[number % len(running)]
        names = sorted(self.workers)
        target = names[(names.index(name) + 1) % len(names)]
        with suppress(InvalidRequest):
            mode = MoveMode.KV if number % 2 else MoveMode.TOKENS
            order = SequenceMove(ref=listed.ref, target=target, mode=mode)
            self._carry_out_plans(self.core.on_move(order, self.now_s))
            self.core.check_integrity()

    def _on_prepared(self, prepared: MovePrepared) -> None:
        key = prepared.ref.key
        stream = self.streams[key]
        self._apply(key, stream.on_prepared(prepared.ref, self.now_s, prepared.target, prepared.open_tokens))

    def _pull(self, source: WorkerProcess, target: WorkerProcess, order: PullBlocks) -> BlocksPulled | None:
        given, taken = self.caches.get(source.name), self.caches.get(target.name)
        is_there = source.alive and not source.frozen and source.incarnation == order.source_incarnation
        if given is None or taken is None or not is_there:
            return None
        return pulled(given, taken, order, most_blocks=self.random.randint(0, 8))

    def _while_it_lives(self, event: str, *details: Any) -> Callable[[], None]:
        life = self.scheduler.life

        def feed() -> None:
            if self.scheduler.life == life and self.scheduler.alive:
                self._feed(event, *details)

        return feed

    # --- workers

    @property
    def longest_tokens(self) -> int:
        """That a worker takes."""
        return self.kv_blocks * 16

    def pool_over(self, worker: WorkerProcess, own: OwnPool) -> Pool:
        """What its sequences get their blocks from."""
        return own

    def start_worker(self, worker: WorkerProcess) -> None:
        worker.alive, worker.busy, worker.beats = True, False, 0
        worker.incarnation += 1
        limits = SequenceLimits(self.longest_tokens, 1000, 60.0, 10.0)
        identity = Identity(
            worker.name, worker.incarnation, MODEL, limits.max_context_tokens, "here", "", FINGERPRINT
        )
        pool = BlockPool(self.kv_blocks, 16)
        prefixes = None
        if self.cached:
            mover: Any = None  # There is no lower tier to copy to.
            cache = self.caches[worker.name] = PrefixCache(pool, Tiers(), mover, CostGate())
            prefixes = Prefixes(cache, FINGERPRINT)
        own = pool if prefixes is None else prefixes.cache
        start = (worker.name, worker.incarnation)
        table = SequenceTable(self.pool_over(worker, own), limits, prefixes, start)
        worker.core = StepCore(identity, table)
        self.every(BEAT_S, lambda: self._beat(worker), worker)
        self.every(BEAT_S, lambda: self._emit(worker, worker.core.on_tick(self.now_s)), worker)

    def _to_worker(self, sender: str, name: str, command: Callable[[StepCore], StepEffects]) -> None:
        worker = self.workers[name]

        def handle() -> None:
            self._emit(worker, command(worker.core))
            self._step(worker)

        self.send(sender, worker, handle)

    def _snapshot(self, worker: WorkerProcess, command: TakeSnapshot) -> WorkerReported:
        return self._numbered(worker, worker.core.on_snapshot(command, self.now_s))

    def _numbered(self, worker: WorkerProcess, report: WorkerReported) -> WorkerReported:
        worker.beats += 1
        return msgspec.structs.replace(report, seq=worker.beats, kv_block_bytes=1 if self.cached else 0)

    def _beat(self, worker: WorkerProcess) -> None:
        report = self._numbered(worker, worker.core.report(self.now_s))
        self.send(worker.name, self.gateway, lambda: self._on_beat(report))
        self.send(worker.name, self.scheduler, lambda: self._feed("on_worker_reported", report))

    def _emit(self, worker: WorkerProcess, effects: StepEffects) -> None:
        for addressed in effects.frames:
            self.send(worker.name, self.gateway, partial(self._on_frame, addressed.frame))
        for event in effects.stepped:
            self.send(worker.name, self.scheduler, partial(self._feed, "on_stepped", event))

    def _step(self, worker: WorkerProcess) -> None:
        if worker.busy or worker.frozen or not worker.alive:
            return
        work, effects = worker.core.begin_step(self.now_s)
        self._emit(worker, effects)
        if work is None:
            return
        worker.busy, life = True, worker.life
        step_s = self.step_s(work)

        def finish() -> None:
            if worker.life != life:
                return
            worker.busy = False
            if worker.frozen:
                worker.mail.insert(0, finish)
                return
            tokens = true_tokens(self.wanted, work)
            self._emit(worker, worker.core.finish_step(work, tokens, self.now_s, step_s))
            worker.core.check_integrity()
            self.read_mail(worker)
            self._step(worker)

        self.at(self.now_s + step_s, finish)
