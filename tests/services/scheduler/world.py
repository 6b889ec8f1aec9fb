"""Core, fake workers, a fake gateway, placement and predictor in virtual time, with everything that can go
wrong.

Every message arrives a little later, in order per pair of ends; one may be lost where the world's chaos
says so. One seed, one history.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.effects import (
    AskPlacement,
    AskPrediction,
    AskPull,
    AskSnapshot,
    AskTokens,
    CancelAtWorker,
    Effect,
    PublishMoved,
    PublishPrepared,
    PublishWorkerLost,
    SendPlan,
    StepDown,
)
from services.scheduler.core.rules import Rules
from services.scheduler.policy.contract import PolicyFactory, PolicySettings
from services.scheduler.policy.first_come import VllmPolicy
from shared.errors import KvasirError, StaleEpoch
from shared.liveness import AwakeTime
from shared.messages.commands import CancelSequence, LengthPrediction
from shared.messages.moves import BlocksPulled, MoveMode, SequenceMove, SequenceMoved
from shared.messages.reports import GatewayReported
from shared.messages.sequence import TOKEN_BYTES, SequenceKey
from tests.services.scheduler.fake_gateway import FakeGateway, Request
from tests.services.scheduler.fake_worker import FakeWorker
from tests.virtual_net import Process, VirtualNet

TICK_S = 0.02
HEARTBEAT_S = 0.25
DELAY_S = 0.001
SMALL = Rules(settings=PolicySettings(token_budget=64, max_batch_sequences=8), round_s=0.3)


class Net(VirtualNet):
    """All messages take as long; which of them are lost, the world says."""

    def delay_s(self) -> float:
        return DELAY_S


@dataclass
class Chaos:
    """What goes wrong by itself, as probabilities per message."""

    lost_reports: float = 0.0
    lost_plans: float = 0.0
    lost_frames: float = 0.0
    silent_placement: float = 0.0


class World:
    """`submit`, `run_until`, and calls that break things."""

    def __init__(
        self,
        seed: int = 0,
        *,
        rules: Rules = SMALL,
        workers: int = 2,
        total_blocks: int = 64,
        step_s: float = 0.01,
        chaos: Chaos | None = None,
        make_policy: PolicyFactory = VllmPolicy,
    ) -> None:
        self.random = random.Random(seed)
        self.rules, self.chaos = rules, chaos or Chaos()
        self.step_s, self.total_blocks = step_s, total_blocks
        self.time = Net()
        self.gateway = FakeGateway(self._deliver_submission, self._to_worker, self._to_all_workers)
        self.workers: dict[str, FakeWorker] = {}
        self._awake = AwakeTime()
        self.processes: dict[str, Process] = {}
        self.log: list[str] = []
        self.core: SchedulerCore | None = None
        self.epoch = 0
        self.too_long_for_the_bus = 10_000
        """Prompt tokens."""
        self.moved: list[SequenceMoved] = []
        self.pulls, self.pulled = True, 0
        self.prepares_gateway = True
        """Else what says that a target is prepared gets lost."""
        self.fingerprint = b""
        self._incarnations = 0
        self.make_policy = make_policy
        self.start_scheduler()
        for number in range(workers):
            self.start_worker(f"worker-{number}")
        self.time.every(TICK_S, self._tick, first_s=TICK_S)
        self.time.every(0.5, self._gateway_beat, first_s=0.5)

    @property
    def now_s(self) -> float:
        return self.time.now_s

    @property
    def core_s(self) -> float:
        """The clock of whoever runs the core: it leaves out the time in which there was none."""
        return self._awake.at(self.now_s)

    @property
    def requests(self) -> dict[SequenceKey, Request]:
        return self.gateway.requests

    def lines(self, effect: str) -> list[str]:
        """Every effect of that kind so far."""
        return [line for line in self.log if line.startswith(effect)]

    def submit(self, name: str, prompt_tokens: int, answer_tokens: int, max_tokens: int) -> Request:
        return self.gateway.accept(name, prompt_tokens, answer_tokens, max_tokens, self.now_s)

    def cancel(self, request: Request) -> None:
        request.cancelled = True
        command = CancelSequence(ref=request.ref)
        self._to_core(lambda core: core.on_cancel(command, self.core_s))
        self._to_all_workers(lambda worker: worker.on_cancel(command))

    def unfinished(self) -> list[SequenceKey]:
        return [request.key for request in self.requests.values() if not request.over]

    def run_until(self, done: Callable[[], bool], *, limit_s: float) -> None:
        """AssertionError, with the state of things, when that takes longer than `limit_s` of virtual time."""
        in_time = self.time.run_until(done, limit_s=limit_s)
        state: Any = self.core.describe() if self.core else "no scheduler"
        assert in_time, f"not done after {limit_s} s: {self.unfinished()} {state}"

    def _deliver_submission(self, request: Request) -> None:
        spec = self.gateway.spec(request, self.now_s)

        def deliver() -> None:
            if self.core is None:
                return
            try:
                _, effects = self.core.on_submit(spec, self.core_s)
            except KvasirError as error:
                request.refused = error
                return
            self._carry_out(effects)

        self.time.after(DELAY_S, deliver)

    def _gateway_beat(self) -> None:
        event = GatewayReported(gateway_id="gateway-0", incarnation=self.gateway.incarnation)
        self._to_core(lambda core: core.on_gateway_reported(event, self.core_s))
        self.gateway.audit(self.now_s)

    # workers

    def start_worker(self, worker_id: str, **fields: Any) -> None:
        self._incarnations += 1
        own: dict[str, Any] = {"total_blocks": self.total_blocks, "fingerprint": self.fingerprint}
        worker = FakeWorker(worker_id, self._incarnations, **own | fields)
        self.workers[worker_id] = worker
        if worker_id in self.processes:
            self.processes[worker_id].alive = False
        process = self.processes[worker_id] = Process(worker_id)
        self.time.every(HEARTBEAT_S, lambda: self._beat(worker), process, first_s=0.0)
        self.time.after(0.0, lambda: self._run_worker(worker, process))

    def kill_worker(self, worker_id: str) -> None:
        del self.workers[worker_id]
        self.processes.pop(worker_id).alive = False

    def freeze_worker(self, worker_id: str) -> None:
        """Nothing runs there; what is sent to it waits in its socket."""
        self.processes[worker_id].frozen = True

    def wake_worker(self, worker_id: str) -> None:
        if worker_id in self.processes:
            self.time.wake(self.processes[worker_id])

    def _to_worker(self, worker_id: str, action: Callable[[FakeWorker], object]) -> None:
        worker = self.workers.get(worker_id)
        if worker is None:
            return

        def handle() -> None:
            action(worker)
            self._drain(worker)

        self.time.send("", self.processes[worker_id], handle, lossy=False)

    def _to_all_workers(self, action: Callable[[FakeWorker], object]) -> None:
        for worker_id in self.workers:
            self._to_worker(worker_id, action)

    def _beat(self, worker: FakeWorker) -> None:
        report = worker.report()
        self._to_core(lambda core: core.on_worker_reported(report, self.core_s))
        self.time.after(DELAY_S, lambda: self.gateway.on_worker_reported(report, self.now_s))

    def _run_worker(self, worker: FakeWorker, process: Process) -> None:
        if not process.alive:
            return
        ran = not process.frozen and worker.step(self.now_s)
        if ran:
            self._check_step(*worker.step_tokens[-1])
        self._drain(worker)
        self.time.after(self.step_s if ran else 0.001, lambda: self._run_worker(worker, process))

    def _check_step(self, prefilled: int, decoded: int) -> None:
        settings = self.rules.settings
        if settings.chunked_prefill:
            assert prefilled + decoded <= settings.token_budget, "over the budget"

    def _drain(self, worker: FakeWorker) -> None:
        events, worker.events = worker.events, []
        for event in events:
            if self.random.random() >= self.chaos.lost_reports:
                self._to_core(lambda core, event=event: core.on_stepped(event, self.core_s))  # type: ignore[misc]
        deltas, worker.deltas = worker.deltas, []
        for _, delta in deltas:
            if self.random.random() >= self.chaos.lost_frames:
                self.time.after(DELAY_S, partial(self.gateway.on_delta, delta, self.now_s))

    # scheduler and its other peers

    def start_scheduler(self) -> None:
        self.epoch += 1
        self.core = SchedulerCore(self.rules, self.make_policy, self.epoch, self.core_s)
        self.time.after(2 * DELAY_S, self.gateway.resubmit_all)

    def kill_scheduler(self) -> None:
        self.core = None

    def _to_core(self, action: Callable[[SchedulerCore], list[Effect]]) -> None:
        def deliver() -> None:
            if self.core is not None:
                self._carry_out(action(self.core))

        self.time.after(DELAY_S, deliver)

    def _to_this_core(
        self, core: SchedulerCore, delay_s: float, action: Callable[[SchedulerCore], list[Effect]]
    ) -> None:
        """An answer: a later scheduler does not hear it."""

        def deliver() -> None:
            if self.core is core:
                self._carry_out(action(core))

        self.time.after(delay_s, deliver)

    def _tick(self) -> None:
        if self.core is not None:
            self._carry_out(self.core.on_tick(self.core_s))

    def _carry_out(self, effects: list[Effect]) -> None:
        core = self.core
        assert core is not None
        core.check_integrity()
        for effect in effects:
            self.log.append(repr(effect))
            match effect:
                case SendPlan():
                    self._send_plan(core, effect)
                case CancelAtWorker(worker_id, command):
                    self._to_worker(worker_id, partial(FakeWorker.on_cancel, command=command))
                case PublishWorkerLost(lost):
                    self.time.after(DELAY_S, partial(self.gateway.on_lost, lost, self.now_s))
                case AskTokens():
                    self._answer_tokens(core, effect)
                case AskPull():
                    self._answer_pull(core, effect)
                case PublishPrepared(prepared):
                    if self.prepares_gateway:
                        self.time.after(DELAY_S, partial(self.gateway.on_prepared, prepared, self.now_s))
                case PublishMoved(moved):
                    self.moved.append(moved)
                case AskPlacement():
                    self._answer_placement(core, effect)
                case AskPrediction():
                    self._answer_prediction(core, effect)
                case AskSnapshot():
                    self._answer_snapshot(core, effect)
                case StepDown(epoch):
                    self.epoch = max(self.epoch, epoch)
                    self.start_scheduler()
                    return

    def _send_plan(self, core: SchedulerCore, effect: SendPlan) -> None:
        if any(spec.prompt_tokens > self.too_long_for_the_bus for spec in effect.plan.starts):
            self._to_this_core(
                core,
                0.0,
                lambda core: core.on_plan_unsent(effect.worker_id, effect.plan, "too large", self.core_s),
            )
            return
        if self.random.random() >= self.chaos.lost_plans:
            self._to_worker(effect.worker_id, lambda worker: worker.on_plan(effect.plan, self.now_s))

    def move(self, request: Request, target: str, mode: MoveMode = MoveMode.TOKENS) -> None:
        """Raises InvalidRequest."""
        assert self.core is not None
        order = SequenceMove(ref=request.ref, target=target, mode=mode)
        self._carry_out(self.core.on_move(order, self.core_s))

    def worker_of(self, request: Request) -> str | None:
        """The one that holds its present attempt."""
        for name, worker in self.workers.items():
            held = worker.held.get(request.key)
            if held is not None and held.spec.ref == request.ref:
                return name
        return None

    def _answer_tokens(self, core: SchedulerCore, question: AskTokens) -> None:
        ref = question.ref

        def answer(worker: FakeWorker) -> None:
            held = worker.held.get(ref.key)
            tokens = tuple(held.tokens[held.spec.prompt_tokens :]) if held and held.spec.ref == ref else None
            self._to_this_core(core, DELAY_S, lambda core: core.on_tokens(ref, tokens, self.core_s))

        self._to_worker(question.worker_id, answer)

    def _answer_pull(self, core: SchedulerCore, question: AskPull) -> None:
        """All whole blocks within 20 ms; nothing where `pulls` says so."""
        tokens = len(question.order.tokens) // TOKEN_BYTES
        self.pulled += 1
        target = self.workers.get(question.worker_id)
        pulled = None
        if target is not None and self.pulls:
            held = tokens // target.block_tokens * target.block_tokens
            pulled = BlocksPulled(held_tokens=held, fetched_bytes=100)
        self._to_this_core(core, 0.02, lambda core: core.on_pulled(question.ref, pulled, self.core_s))

    def _answer_placement(self, core: SchedulerCore, question: AskPlacement) -> None:
        silent = self.random.random() < self.chaos.silent_placement
        names = sorted(set(self.workers) - set(question.excluded_workers))
        places = tuple(self.random.choice([None, *names]) if names else None for _ in question.items)
        self._to_this_core(
            core,
            1.0 if silent else 2 * DELAY_S,
            lambda core: core.on_placed(question.question, None if silent else places, self.core_s),
        )

    def _answer_prediction(self, core: SchedulerCore, question: AskPrediction) -> None:
        tokens = min(question.max_tokens, 40)
        prediction = LengthPrediction(
            rl_tokens=tokens,
            p50_tokens=tokens,
            p80_tokens=tokens,
            p90_tokens=tokens,
            p95_tokens=tokens,
            model_version="fake",
        )
        delay_s = self.random.choice([0.002, 1.5])
        self._to_this_core(
            core, delay_s, lambda core: core.on_predicted(question.ref, prediction, self.core_s)
        )

    def _answer_snapshot(self, core: SchedulerCore, question: AskSnapshot) -> None:
        closed: list[str] = []

        def ask(worker: FakeWorker) -> None:
            if closed or worker.is_mute:
                return
            try:
                snapshot = worker.on_snapshot(question.epoch)
            except StaleEpoch:
                return
            closed.append("answered")
            self._to_this_core(core, DELAY_S, lambda core: core.on_snapshot(snapshot, self.core_s))

        def give_up() -> None:
            if not closed:
                closed.append("given up")
                self._to_this_core(
                    core, 0.0, lambda core: core.on_snapshot_failed(question.worker_id, self.core_s)
                )

        self._to_worker(question.worker_id, ask)
        self.time.after(2.0, give_up)
