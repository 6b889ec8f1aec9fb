"""The three cores that a request meets (gateway stream, scheduler, worker) in one process, on virtual time.

Nothing of them is replaced; only bus and engine are. The bus is `virtual_net`; the engine's token is a
function of sequence and index, so that every answer is known beforehand.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Any

import msgspec

from services.gateway.core.stream import StreamEffect as StreamEffect
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.effects import (
    AskPlacement,
    AskPrediction,
    AskPull,
    AskSnapshot,
    AskTokens,
    CancelAtWorker,
    PublishMoved,
    PublishPrepared,
    PublishWorkerLost,
    SendPlan,
    StepDown,
)
from services.scheduler.core.effects import Effect as SchedulerEffect
from services.scheduler.core.rules import Rules
from services.scheduler.policy.contract import PolicyFactory
from services.scheduler.policy.first_come import VllmPolicy
from services.worker.core.plans import StepWork
from services.worker.core.prefixes import Prefixes
from services.worker.core.sampling import KV_LOST
from services.worker.core.steps import StepCore, StepEffects
from services.worker.kv.core.block_manager import Tiers
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.borrowed_pool import OwnPool, Pool
from services.worker.kv.core.load_policy import CostGate
from services.worker.kv.core.prefix_cache import PrefixCache
from shared.errors import InvalidRequest
from shared.liveness import AwakeTime
from shared.messages.commands import CancelSequence, PlacementItem, TakeSnapshot
from shared.messages.moves import BlocksPulled, MoveMode, PullBlocks, SequenceMove, SequenceMoved
from shared.messages.plans import BatchPlan
from shared.messages.reports import SchedulerAnnounced, WorkerReported
from shared.messages.sequence import SequenceKey, SequenceRef, SequenceSpec
from shared.messages.tokens import FetchTokens
from tests.shared.messages.builders import predicted
from tests.stack.actors import (
    FINGERPRINT,
    Request,
    TrueDrafts,
    Wanted,
    WorkerProcess,
    pulled,
    shadowed,
    step_core,
    true_tokens,
)
from tests.stack.gateway import Gateway
from tests.stack.virtual_tiers import VirtualTiers
from tests.virtual_net import DEADLINE_S, Process, VirtualNet


@dataclass(frozen=True)
class Pace:
    """How often everybody speaks, how long messages and steps take, how much a pull brings: where there are
    several, one by chance. Seconds."""

    delays_s: tuple[float, ...] = (0.0005, 0.001, 0.003, 0.02)
    steps_s: tuple[float, ...] = (0.003, 0.005, 0.02)
    pulled_blocks: tuple[int, ...] = tuple(range(9))
    copies_s: tuple[float, ...] = (0.0, 0.001, 0.01, 0.1, 3.0)
    """Between device and host."""
    copy_faults: float = 0.1
    """Of copies."""
    tick_s: float = 0.05
    beat_s: float = 0.25
    report_s: float = 0.5


EVEN = Pace(delays_s=(0.001,), steps_s=(0.01,), pulled_blocks=(1000,), tick_s=0.02)
"""For tests that look at one case: all messages take as long, all steps, and a pull brings all there is."""


class World(VirtualNet):
    """One gateway, one scheduler, some workers. `run` returns when every stream has ended, or time is up."""

    def __init__(
        self,
        seed: int = 0,
        wanted: Sequence[Wanted] = (),
        *,
        workers: int,
        kv_blocks: int,
        block_tokens: int = 16,
        loss: float = 0.0,
        cached: bool = False,
        host_blocks: int = 0,
        disk_blocks: int = 0,
        peer_blocks: int = 0,
        policy: PolicyFactory = VllmPolicy,
        rules: Rules | None = None,
        pace: Pace = Pace(),
        says: Mapping[str, Any] = MappingProxyType({}),
        guesses: bool = False,
    ) -> None:
        """`cached`: blocks outlive their sequences, on the device, in `host_blocks`, `disk_blocks` and up to
        `peer_blocks` that come and go. `says`: what all workers' reports have, whatever is true. `guesses`:
        workers guess tokens, mostly right ones."""
        super().__init__(seed, loss)
        self.host_blocks, self.disk_blocks, self.peer_blocks = host_blocks, disk_blocks, peer_blocks
        self.tiers: dict[str, VirtualTiers] = {}
        self.prefixes: dict[str, Prefixes] = {}
        self.cached, self.policy, self.rules, self.pace = cached, policy, rules or Rules(), pace
        self.says, self.guesses = dict(says), guesses
        self.choose: Callable[[list[str | None]], str | None] = self.random.choice
        """Placement: of these workers."""
        self.is_lost: Callable[[SchedulerEffect], bool] = lambda _: False
        """Of what the scheduler sends."""
        self.skipped: set[str] = set()
        """Requests that no plan is right for, as their workers say."""
        self.too_long_for_the_bus = 10**9
        """Prompt tokens."""
        self.is_checked = True
        """After every event; else when the test does."""
        self.effects: list[SchedulerEffect] = []
        self.moved: list[SequenceMoved] = []
        self.wanted = {(f"r{number}", 0): one for number, one in enumerate(wanted)}
        self.kv_blocks, self.block_tokens = kv_blocks, block_tokens
        self.gateway = Gateway(self, self.wanted)
        self.submit, self.streams = self.gateway.submit, self.gateway.streams
        self.scheduler = Process("scheduler-0")
        self.workers: dict[str, WorkerProcess] = {}
        self._epoch = self._term = 0
        self._awake = AwakeTime()
        self._predictor = Random(seed)
        self.caches: dict[str, PrefixCache] = {}
        for number in range(workers):
            self.start_worker(f"worker-{number}")
        self.start_scheduler()
        self.every(pace.tick_s, self.gateway.tick)
        self.every(pace.report_s, self.gateway.report)

    def delay_s(self) -> float:
        return self.random.choice(self.pace.delays_s)

    @property
    def is_over(self) -> bool:
        """Every answer is there, or has failed."""
        return len(self.streams) == len(self.wanted) and not any(s.is_open for s in self.streams.values())

    def revive(self, process: Process) -> None:
        if isinstance(process, WorkerProcess):
            self.start_worker(process.name)
        else:
            self.start_scheduler()

    @property
    def core_s(self) -> float:
        """The clock of whoever runs the scheduler's core: it leaves out the time in which there was none."""
        return self._awake.at(self.now_s)

    def until(self, done: Callable[[], bool], *, limit_s: float) -> None:
        """AssertionError, with the state of things, when that takes longer than `limit_s` of virtual time."""
        in_time = self.run_until(done, limit_s=limit_s)
        assert in_time, f"not done after {limit_s} s: {self.unfinished()} {self.core.describe()}"

    def lines(self, effect: str) -> list[str]:
        """Every effect of that kind that the scheduler had so far, as text."""
        return [repr(one) for one in self.effects if type(one).__name__ == effect]

    # --- clients

    def ask_for(self, name: str, prompt_tokens: int, answer_tokens: int, max_tokens: int) -> Request:
        """Begins now."""
        key = (name, 0)
        self.wanted[key] = Wanted(prompt_tokens, answer_tokens, max_tokens)
        self.submit(key)
        return Request(self.wanted[key], self.streams[key])

    @property
    def requests(self) -> list[Request]:
        return [Request(self.wanted[key], stream) for key, stream in self.streams.items()]

    def unfinished(self) -> list[SequenceKey]:
        return [key for key, stream in self.streams.items() if stream.is_open]

    def hand_over(self, request: Request) -> None:
        """It is submitted again, as another attempt."""
        self.gateway.apply(request.key, request.stream.on_prepared(request.ref, self.now_s))

    def cancel(self, request: Request) -> None:
        self.gateway.apply(request.key, request.stream.cancel())

    # --- the scheduler

    def start_scheduler(self) -> None:
        self.scheduler.alive = True
        self._lead(self._epoch + 1)
        self.every(self.pace.tick_s, lambda: self.feed("on_tick"), self.scheduler)
        self.every(self.pace.report_s, self._announce, self.scheduler)

    def _lead(self, epoch: int) -> None:
        """A term begins."""
        self._epoch, self._term = epoch, self._term + 1
        was_standby = self._term > 1  # And has heard who was there.
        present = [(one.name, one.incarnation) for one in self.workers.values() if was_standby and one.alive]
        self.core = SchedulerCore(self.rules, self.policy, epoch, self.core_s, awaited=present)

    def _announce(self) -> None:
        event = SchedulerAnnounced(
            scheduler_id=self.scheduler.name, incarnation=self._term, epoch=self.core.epoch, policy="vllm"
        )
        self.send(self.scheduler.name, self.gateway, lambda: self.gateway.on_announced(event))

    def submitted(self, spec: SequenceSpec) -> None:
        _, effects = self.core.on_submit(spec, self.core_s)
        self._carry_out_plans(effects)

    def feed(self, event: str, *details: Any, **more: Any) -> None:
        self._carry_out_plans(getattr(self.core, event)(*details, self.core_s, **more))
        if self.is_checked:
            self.core.check_integrity()

    def _carry_out_plans(self, effects: list[SchedulerEffect]) -> None:
        self.effects += effects
        for effect in effects:
            if not self.is_lost(effect):
                self._carry_out_plan(effect)

    def _carry_out_plan(self, effect: SchedulerEffect) -> None:
        match effect:
            case SendPlan(worker_id, plan) if self._is_too_long(plan):
                self.after(0.0, self._while_it_lives("on_plan_unsent", worker_id, plan, "too large"))
            case SendPlan(worker_id, plan):
                sent = self._spoilt(plan) if self.skipped else plan
                self.to_worker(self.scheduler.name, worker_id, lambda core: core.on_plan(sent, self.now_s))
            case CancelAtWorker(worker_id, ref, gateway_id, reason):
                command = CancelSequence(
                    ref=ref, sender=self.scheduler.name, gateway_id=gateway_id, reason=reason
                )
                self.to_worker(
                    self.scheduler.name, worker_id, lambda core: core.on_cancel(command, self.now_s)
                )
            case PublishWorkerLost(lost):
                start, attempts = (lost.worker_id, lost.incarnation), {r.key: r.attempt for r in lost.refs}
                self.send(self.scheduler.name, self.gateway, lambda: self.gateway.lose(start, attempts))
            case AskTokens(worker_id, ref, is_shadow):
                asked, told = self.workers[worker_id], partial(self.feed, "on_tokens", is_shadow=is_shadow)
                question = FetchTokens(ref=ref, sender=self.scheduler.name, first_index=0)
                self.ask(
                    self.scheduler,
                    asked,
                    lambda: asked.core.on_fetch(question).delta,
                    lambda delta: told(ref, None if delta is None else delta.tokens),
                    lambda _: told(ref, None),
                )
            case AskPull(worker_id, ref, order):
                target, source = self.workers[worker_id], self.workers[order.source]
                fetched = partial(self.feed, "on_pulled", is_shadow=order.is_shadow)
                self.ask(
                    self.scheduler,
                    target,
                    lambda: self._pull(source, target, order),
                    lambda pulled: fetched(ref, pulled),
                    lambda _: fetched(ref, None),
                )
            case PublishPrepared(prepared):
                self.send(self.scheduler.name, self.gateway, lambda: self.gateway.on_prepared(prepared))
            case PublishMoved(moved):
                self.moved.append(moved)
            case AskPlacement(question, items, excluded, withdrawn):
                self.withdraw(withdrawn)
                answer = self.place(items, excluded)
                self.after(0.002, self._while_it_lives("on_placed", question, answer))
            case AskPrediction(ref=ref, max_tokens=max_tokens):
                self.after(
                    self._predictor.choice((0.002, 1.5)),
                    self._while_it_lives("on_predicted", ref, predicted(min(max_tokens, 40))),
                )
            case StepDown(epoch):
                self._lead(max(self._epoch, epoch) + 1)
                self._announce()
            case AskSnapshot(worker_id) if self.workers[worker_id].is_mute:
                self.after(DEADLINE_S, self._while_it_lives("on_snapshot_failed", worker_id))
            case AskSnapshot(worker_id, epoch, _):
                worker = self.workers[worker_id]
                self.ask(
                    self.scheduler,
                    worker,
                    lambda: self._snapshot(worker, TakeSnapshot(epoch=epoch)),
                    lambda snapshot: self.feed("on_snapshot", snapshot),
                    lambda _: self.feed("on_snapshot_failed", worker_id),
                )

    def _spoilt(self, plan: BatchPlan) -> BatchPlan:
        prefills = (
            msgspec.structs.replace(one, first_token=one.first_token + 1, end_token=one.end_token + 1)
            if one.ref.request_id in self.skipped
            else one
            for one in plan.prefills
        )
        return msgspec.structs.replace(plan, prefills=tuple(prefills))

    def _is_too_long(self, plan: BatchPlan) -> bool:
        return any(spec.prompt_tokens > self.too_long_for_the_bus for spec in plan.starts)

    def withdraw(self, refs: tuple[SequenceRef, ...]) -> None:
        """Placement is told that these left before their start; here it has no books."""

    def place(self, items: tuple[PlacementItem, ...], excluded: tuple[str, ...]) -> tuple[str | None, ...]:
        """Placement's answer to one question."""
        open_: list[str | None] = [name for name in self.workers if name not in excluded]
        return tuple(self.choose(open_ or [None]) for _ in items)

    def step_s(self, work: StepWork) -> float:
        """How long the engine takes."""
        return self.random.choice(self.pace.steps_s)

    def computed(self, worker: WorkerProcess, work: StepWork) -> set[int]:
        """The engine has run: items whose KV was lost. Here nobody keeps account of what it reads and
        writes."""
        return set()

    def move_to(self, target: str, request: Request, mode: MoveMode = MoveMode.TOKENS) -> None:
        """Raises InvalidRequest."""
        order = SequenceMove(ref=request.ref, target=target, mode=mode)
        self.feed("on_move", order)

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
            self.feed("on_move", order)

    def _pull(self, source: WorkerProcess, target: WorkerProcess, order: PullBlocks) -> BlocksPulled | None:
        given, taken = self.caches.get(source.name), self.caches.get(target.name)
        is_there = source.alive and not source.frozen and source.incarnation == order.source_incarnation
        if given is None or taken is None or not is_there:
            return None
        most_blocks = self.random.choice(self.pace.pulled_blocks)
        if order.is_shadow:
            copy = partial(self.tiers[target.name].receive, self.tiers[source.name])
            return shadowed(given, taken, order, self.now_s, most_blocks=most_blocks, copy=copy)
        return pulled(given, taken, order, most_blocks=most_blocks, copy=partial(self.copied, source, target))

    def copied(self, source: WorkerProcess, target: WorkerProcess, block: int, to: int) -> bool:
        """A block of one worker to one of another; whether it could be read. Nobody keeps account here."""
        return True

    def _while_it_lives(self, event: str, *details: Any) -> Callable[[], None]:
        core = self.core

        def feed() -> None:
            if self.core is core and self.scheduler.alive:
                self.feed(event, *details)

        return feed

    # --- workers

    @property
    def longest_tokens(self) -> int:
        """That a worker takes."""
        return self.kv_blocks * self.block_tokens

    def own_pool(self, worker: WorkerProcess) -> BlockPool:
        """The blocks of its engine."""
        return BlockPool(self.kv_blocks, self.block_tokens)

    def pool_over(self, worker: WorkerProcess, own: OwnPool) -> Pool:
        """What its sequences get their blocks from."""
        return own

    def start_worker(self, name: str, **says: Any) -> None:
        """A new one, or again; `says` is in its reports whatever is true."""
        worker = self.workers.setdefault(name, WorkerProcess(name))
        worker.clock = lambda: self.now_s
        worker.begin(self.says | says)
        pool = self.own_pool(worker)
        prefixes = None
        if self.cached:
            after = partial(self._at_rest, worker, worker.life)
            mover = VirtualTiers(after, self.random, self.pace.copies_s, self.pace.copy_faults)
            host, disk, half = self.host_blocks, self.disk_blocks, self.host_blocks // 2
            tiers = Tiers(host, disk, "frequent", half, half, self.peer_blocks)
            cache = self.caches[name] = PrefixCache(pool, tiers, mover, CostGate())
            if name in self.tiers:
                mover.file = self.tiers[name].file
                cache.restore([node for node, _ in mover.file.values()])
            self.tiers[name], mover.cache = mover, cache
            prefixes = self.prefixes[name] = Prefixes(cache, FINGERPRINT)
            if self.peer_blocks:
                self.every(self.pace.beat_s, partial(after, 0.0, mover.visit_peers), worker)
        own = pool if prefixes is None else prefixes.cache
        start, pool_over = (name, worker.incarnation), self.pool_over(worker, own)
        drafts = TrueDrafts.of(self.wanted, self.random) if self.guesses else None
        worker.core = step_core(start, pool_over, self.longest_tokens, prefixes, drafts)
        self.every(self.pace.beat_s, lambda: self._beat(worker), worker)
        self.every(self.pace.beat_s, lambda: self._emit(worker, worker.core.on_tick(self.now_s)), worker)

    def _at_rest(self, worker: WorkerProcess, life: int, delay_s: float, do: Callable[[], None]) -> None:
        """A thread of the worker's ends something."""

        def handle() -> None:
            do()
            self._step(worker)

        def end() -> None:
            if worker.alive and worker.life == life:
                if worker.frozen or worker.busy:
                    worker.mail.append(handle)
                else:
                    handle()

        self.after(delay_s, end)

    def worker_of(self, request: Request) -> str | None:
        """The one that holds its present attempt."""
        return next((name for name, worker in self.workers.items() if request.ref in worker.held), None)

    def to_worker(self, sender: str, name: str, command: Callable[[StepCore], StepEffects | None]) -> None:
        worker = self.workers[name]

        def handle() -> None:
            self._emit(worker, command(worker.core) or StepEffects())
            self._step(worker)

        self.send(sender, worker, handle)

    def _snapshot(self, worker: WorkerProcess, command: TakeSnapshot) -> WorkerReported:
        return self._numbered(worker, worker.core.on_snapshot(command, self.now_s))

    def _numbered(self, worker: WorkerProcess, report: WorkerReported) -> WorkerReported:
        return worker.numbered(msgspec.structs.replace(report, kv_block_bytes=1 if self.cached else 0))

    def _beat(self, worker: WorkerProcess) -> None:
        report = self._numbered(worker, worker.core.report(self.now_s))
        self.send(worker.name, self.gateway, lambda: self.gateway.on_beat(report))
        self.send(worker.name, self.scheduler, lambda: self.feed("on_worker_reported", report))

    def _emit(self, worker: WorkerProcess, effects: StepEffects) -> None:
        for addressed in effects.frames:
            self.send(worker.name, self.gateway, partial(self.gateway.on_frame, addressed.frame))
        for event in effects.stepped:
            self.send(worker.name, self.scheduler, partial(self.feed, "on_stepped", event))

    def _step(self, worker: WorkerProcess) -> None:
        if worker.busy or worker.frozen or not worker.alive:
            return
        if self.host_blocks and self.cached:
            self.prefixes[worker.name].work_ahead()
        work, effects = worker.core.begin_step(self.now_s)
        self._emit(worker, effects)
        if work is None:
            return
        settings = self.rules.settings
        beyond = self.host_blocks or self.guesses  # what was put off and drafts come on top of a plan
        if settings.chunked_prefill and not beyond:
            assert work.prefilled_tokens + work.decoded_tokens <= settings.token_budget, "over the budget"
        worker.step_tokens.append((work.prefilled_tokens, work.decoded_tokens))
        worker.busy, life = True, worker.life
        step_s = self.step_s(work)

        def finish() -> None:
            if worker.life != life:
                return
            worker.busy = False
            if worker.frozen:
                worker.mail.insert(0, finish)
                return
            lost = self.computed(worker, work)
            true = true_tokens(self.wanted, work)
            tokens = [KV_LOST if at in lost else token for at, token in enumerate(true)]
            self._emit(worker, worker.core.finish_step(work, tokens, self.now_s, step_s))
            worker.core.check_integrity()
            self.read_mail(worker)
            self._step(worker)

        self.at(self.now_s + step_s, finish)
