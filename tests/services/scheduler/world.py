"""Core, fake workers, a fake gateway, placement and predictor in virtual time, with everything that can go wrong.

Every message passes `World._post` and arrives later, in order per pair of ends; a message may be lost when the world's
chaos says so. One seed, one history.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.scheduler.core import SchedulerCore
from services.scheduler.effects import (
    AskPlacement,
    AskPrediction,
    AskSnapshot,
    CancelAtWorker,
    Effect,
    PublishWorkerLost,
    SendPlan,
    StepDown,
)
from services.scheduler.policy.contract import PolicyFactory, PolicySettings
from services.scheduler.policy.vllm import VllmPolicy
from services.scheduler.rules import Rules
from shared.errors import KvasirError, StaleEpoch
from shared.messages.commands import CancelSequence, LengthPrediction
from shared.messages.reports import GatewayReported, SequenceState, WorkerLost, WorkerReported
from shared.messages.sequence import FinishReason, Sampling, SequenceKey, SequenceRef, SequenceSpec, pack_tokens
from shared.messages.tokens import TokenDelta
from tests.services.scheduler.fake_worker import END, FakeWorker, answer_token

TICK_S = 0.02
HEARTBEAT_S = 0.25
DELAY_S = 0.001


@dataclass
class Request:
    """A sequence as its gateway sees it."""

    key: SequenceKey
    prompt: bytes
    max_tokens: int
    born_s: float
    attempt: int = 1
    tokens: list[int] = field(default_factory=list)
    ends: list[FinishReason] = field(default_factory=list)
    sign_s: float = 0.0
    cancelled: bool = False
    refused: KvasirError | None = None

    @property
    def ref(self) -> SequenceRef:
        return SequenceRef(request_id=self.key[0], choice=self.key[1], attempt=self.attempt)

    @property
    def expected(self) -> list[int]:
        length = max(1, int.from_bytes(self.prompt[:4], "little"))
        return [answer_token(self.key, index, length) for index in range(min(length, self.max_tokens))]

    @property
    def over(self) -> bool:
        return bool(self.ends) or self.cancelled or self.refused is not None


@dataclass
class Chaos:
    """What goes wrong by itself."""

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
        rules: Rules | None = None,
        workers: int = 2,
        total_blocks: int = 64,
        step_s: float = 0.01,
        chaos: Chaos | None = None,
        make_policy: PolicyFactory = VllmPolicy,
    ) -> None:
        self.random = random.Random(seed)
        self.rules = rules or Rules(settings=PolicySettings(token_budget=64, max_batch_sequences=8), round_s=0.3)
        self.chaos = chaos or Chaos()
        self.now_s = 0.0
        self.step_s = step_s
        self.total_blocks = total_blocks
        self._make_policy = make_policy
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._incarnations = 0
        self.requests: dict[SequenceKey, Request] = {}
        self.workers: dict[str, FakeWorker] = {}
        self.frozen: dict[str, list[Callable[[], None]]] = {}
        self.gateway_incarnation = 1
        self.log: list[str] = []
        self.core: SchedulerCore | None = None
        self.epoch = 0
        self.start_scheduler()
        for number in range(workers):
            self.start_worker(f"worker-{number}")
        self._every(TICK_S, self._tick)
        self._every(0.5, self._gateway_beat)

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when_s, self._count, action))

    def _every(self, interval_s: float, action: Callable[[], None]) -> None:
        def again() -> None:
            action()
            self.at(self.now_s + interval_s, again)

        self.at(self.now_s + interval_s, again)

    def run_until(self, done: Callable[[], bool], *, limit_s: float) -> None:
        """Let time pass until `done`; AssertionError when that takes longer than `limit_s` of virtual time."""
        end_s = self.now_s + limit_s
        while not done():
            when_s, _, action = heapq.heappop(self._events)
            assert when_s <= end_s, f"not done after {limit_s} s: {self.unfinished()} {self.describe()}"
            self.now_s = max(self.now_s, when_s)
            action()

    def run_for(self, duration_s: float) -> None:
        end_s = self.now_s + duration_s
        while self._events[0][0] <= end_s:
            when_s, _, action = heapq.heappop(self._events)
            self.now_s = max(self.now_s, when_s)
            action()
        self.now_s = end_s

    def unfinished(self) -> list[SequenceKey]:
        return [request.key for request in self.requests.values() if not request.over]

    def describe(self) -> Any:
        return self.core.describe() if self.core else "no scheduler"

    # gateway

    def submit(self, name: str, prompt_tokens: int, answer_tokens: int, max_tokens: int) -> Request:
        prompt = pack_tokens([answer_tokens, *([7] * (prompt_tokens - 1))])
        request = Request((name, 0), prompt, max_tokens, self.now_s, sign_s=self.now_s)
        self.requests[request.key] = request
        self._submit(request)
        return request

    def cancel(self, request: Request) -> None:
        request.cancelled = True
        command = CancelSequence(ref=request.ref)
        self._to_core(lambda core: core.on_cancel(command, self.now_s))
        for worker_id in self.workers:
            self._to_worker(worker_id, lambda worker: worker.on_cancel(command))

    def _spec(self, request: Request) -> SequenceSpec:
        return SequenceSpec(
            ref=request.ref,
            gateway_id="gateway-0",
            gateway_incarnation=self.gateway_incarnation,
            prompt=request.prompt,
            sampling=Sampling(seed=1, max_tokens=request.max_tokens, end_token_ids=(END,)),
            generated=pack_tokens(request.tokens),
            waited_s=self.now_s - request.born_s,
        )

    def _submit(self, request: Request) -> None:
        spec = self._spec(request)

        def deliver() -> None:
            if self.core is None:
                return
            try:
                _, effects = self.core.on_submit(spec, self.now_s)
            except KvasirError as error:
                request.refused = error
                return
            self._carry_out(effects)

        self.at(self.now_s + DELAY_S, deliver)

    def _on_delta(self, delta: TokenDelta) -> None:
        request = self.requests[(delta.request_id, delta.choice)]
        if delta.attempt != request.attempt or request.cancelled or delta.first_index > len(request.tokens):
            return
        request.sign_s = self.now_s
        request.tokens += delta.tokens[len(request.tokens) - delta.first_index :]
        if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and not request.ends:
            request.ends.append(delta.finish_reason)
            for worker_id in self.workers:
                self._to_worker(worker_id, lambda worker: worker.acknowledge(request.ref))

    def _on_lost(self, lost: WorkerLost) -> None:
        for ref in lost.refs:
            request = self.requests[ref.key]
            if request.ref == ref and not request.over:
                request.attempt += 1
                request.sign_s = self.now_s
                self._submit(request)

    def _gateway_hears(self, worker_id: str, report: WorkerReported) -> None:
        for listed in report.sequences:
            request = self.requests[listed.ref.key]
            if listed.ref.attempt != request.attempt or request.over:
                if listed.ref.attempt < request.attempt or request.over:
                    self._to_worker(worker_id, lambda worker, ref=listed.ref: self._dismiss(worker, ref))
                continue
            request.sign_s = self.now_s
            missed = listed.generated_tokens > len(request.tokens)
            if missed or listed.state is SequenceState.ENDED:
                self._fetch(worker_id, request)

    @staticmethod
    def _dismiss(worker: FakeWorker, ref: SequenceRef) -> None:
        worker.acknowledge(ref)
        worker.on_cancel(CancelSequence(ref=ref))

    def _fetch(self, worker_id: str, request: Request) -> None:
        ref, first = request.ref, len(request.tokens)

        def answer(worker: FakeWorker) -> None:
            held = worker.held.get(ref.key)
            if held is not None and held.spec.ref == ref:
                tokens = tuple(held.tokens[held.spec.prompt_tokens + first :])
                delta = TokenDelta(ref.request_id, ref.choice, ref.attempt, first, tokens, held.reason)
                self.at(self.now_s + DELAY_S, lambda: self._on_delta(delta))

        self._to_worker(worker_id, answer)

    def _gateway_beat(self) -> None:
        event = GatewayReported(gateway_id="gateway-0", incarnation=self.gateway_incarnation)
        self._to_core(lambda core: core.on_gateway_reported(event, self.now_s))
        for request in self.requests.values():
            if not request.over and self.now_s - request.sign_s > 3.0:
                request.sign_s = self.now_s
                self._submit(request)

    # workers

    def start_worker(self, worker_id: str) -> None:
        self._incarnations += 1
        worker = FakeWorker(worker_id, self._incarnations, total_blocks=self.total_blocks)
        self.workers[worker_id] = worker
        self.at(self.now_s, lambda: self._beat(worker))
        self.at(self.now_s, lambda: self._run_worker(worker))

    def kill_worker(self, worker_id: str) -> None:
        del self.workers[worker_id]
        self.frozen.pop(worker_id, None)

    def freeze_worker(self, worker_id: str) -> None:
        """Nothing runs there; what is sent to it waits in its socket."""
        self.frozen.setdefault(worker_id, [])

    def wake_worker(self, worker_id: str) -> None:
        for action in self.frozen.pop(worker_id, []):
            self.at(self.now_s, action)

    def _alive(self, worker: FakeWorker) -> bool:
        return self.workers.get(worker.worker_id) is worker

    def _to_worker(self, worker_id: str, action: Callable[[FakeWorker], None]) -> None:
        worker = self.workers.get(worker_id)
        if worker is None:
            return

        def deliver() -> None:
            if worker_id in self.frozen:
                self.frozen[worker_id].append(deliver)
            elif self._alive(worker):
                action(worker)
                self._drain(worker)

        self.at(self.now_s + DELAY_S, deliver)

    def _beat(self, worker: FakeWorker) -> None:
        if not self._alive(worker):
            return
        if worker.worker_id not in self.frozen:
            report = worker.report()
            self._to_core(lambda core: core.on_worker_reported(report, self.now_s))
            self.at(self.now_s + DELAY_S, lambda: self._gateway_hears(worker.worker_id, report))
        self.at(self.now_s + HEARTBEAT_S, lambda: self._beat(worker))

    def _run_worker(self, worker: FakeWorker) -> None:
        if not self._alive(worker):
            return
        ran = worker.worker_id not in self.frozen and worker.step(self.now_s)
        if ran:
            prefilled, decoded = worker.step_tokens[-1]
            self.check_step(prefilled, decoded)
        self._drain(worker)
        self.at(self.now_s + (self.step_s if ran else 0.001), lambda: self._run_worker(worker))

    def check_step(self, prefilled: int, decoded: int) -> None:
        settings = self.rules.settings
        assert decoded <= settings.max_batch_sequences
        if settings.chunked_prefill:
            assert prefilled + decoded <= settings.token_budget, "over the budget"

    def _drain(self, worker: FakeWorker) -> None:
        events, worker.events = worker.events, []
        for event in events:
            if self.random.random() >= self.chaos.lost_reports:
                self._to_core(lambda core, event=event: core.on_stepped(event, self.now_s))
        deltas, worker.deltas = worker.deltas, []
        for _, delta in deltas:
            if self.random.random() >= self.chaos.lost_frames:
                self.at(self.now_s + DELAY_S, lambda delta=delta: self._on_delta(delta))

    # scheduler

    def start_scheduler(self) -> None:
        self.epoch += 1
        self.core = SchedulerCore(self.rules, self._make_policy, self.epoch, self.now_s)

        def resubmit() -> None:
            for request in self.requests.values():
                if not request.over:
                    self._submit(request)

        self.at(self.now_s + 2 * DELAY_S, resubmit)

    def kill_scheduler(self) -> None:
        self.core = None

    def _to_core(self, action: Callable[[SchedulerCore], list[Effect]]) -> None:
        def deliver() -> None:
            if self.core is not None:
                self._carry_out(action(self.core))

        self.at(self.now_s + DELAY_S, deliver)

    def _tick(self) -> None:
        if self.core is not None:
            self._carry_out(self.core.on_tick(self.now_s))

    def _carry_out(self, effects: list[Effect]) -> None:
        core = self.core
        assert core is not None
        core.check_integrity()
        for effect in effects:
            self.log.append(repr(effect))
            match effect:
                case SendPlan(worker_id, plan):
                    if self.random.random() >= self.chaos.lost_plans:
                        self._to_worker(worker_id, lambda worker, plan=plan: worker.on_plan(plan, self.now_s))
                case CancelAtWorker(worker_id, command):
                    self._to_worker(worker_id, lambda worker, command=command: worker.on_cancel(command))
                case PublishWorkerLost(lost):
                    self.at(self.now_s + DELAY_S, lambda lost=lost: self._on_lost(lost))
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

    def _answer_placement(self, core: SchedulerCore, question: AskPlacement) -> None:
        silent = self.random.random() < self.chaos.silent_placement
        names = sorted(set(self.workers) - set(question.excluded_workers))
        places = tuple(self.random.choice([None, *names]) if names else None for _ in question.items)

        def deliver() -> None:
            if self.core is core:
                self._carry_out(core.on_placed(question.question, None if silent else places, self.now_s))

        self.at(self.now_s + (1.0 if silent else 2 * DELAY_S), deliver)

    def _answer_prediction(self, core: SchedulerCore, question: AskPrediction) -> None:
        length = min(question.max_tokens, 40)
        prediction = LengthPrediction(
            rl_tokens=length,
            p50_tokens=length,
            p80_tokens=length,
            p90_tokens=length,
            p95_tokens=length,
            model_version="fake",
        )

        def deliver() -> None:
            if self.core is core:
                self._carry_out(core.on_predicted(question.ref, prediction, self.now_s))

        self.at(self.now_s + self.random.choice([0.002, 1.5]), deliver)

    def _answer_snapshot(self, core: SchedulerCore, question: AskSnapshot) -> None:
        answered: list[bool] = []

        def reply(report: WorkerReported) -> None:
            answered.append(True)
            if self.core is core:
                self._carry_out(core.on_snapshot(report, self.now_s))

        def ask(worker: FakeWorker) -> None:
            if len(answered) == 0:
                try:
                    report = worker.on_snapshot(question.epoch)
                except StaleEpoch:
                    return
                self.at(self.now_s + DELAY_S, lambda: reply(report))

        def give_up() -> None:
            if not answered:
                answered.append(False)
                if self.core is core:
                    self._carry_out(core.on_snapshot_failed(question.worker_id, self.now_s))

        self._to_worker(question.worker_id, ask)
        self.at(self.now_s + 2.0, give_up)
