"""One engine under the live cores of scheduler and worker, in one thread, with real plans, steps and copies.

It replaces a stack's processes with calls, so that several engines can take turns on two cores. The number of
clients is fixed; each sends its next request when an answer ends.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from time import sleep

import msgspec

from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.effects import (
    AskPlacement,
    AskPrediction,
    AskSnapshot,
    Effect,
    SendPlan,
    SequenceLeft,
)
from services.scheduler.core.rules import Rules
from services.scheduler.policy import find_policy
from services.scheduler.policy.contract import PolicySettings
from services.worker.core.prefixes import Prefixes
from services.worker.core.reports import Identity
from services.worker.core.sequences import SequenceLimits, SequenceTable
from services.worker.core.steps import StepCore, StepEffects
from services.worker.engine.engine import TorchEngine
from services.worker.engine_thread import row_of
from services.worker.kv.store import KvStore
from shared.clock import Clock, monotonic_s
from shared.errors import InternalError
from shared.messages.commands import TakeSnapshot
from shared.messages.reports import WorkerReported
from shared.messages.sequence import Sampling, SequenceRef, SequenceSpec, pack_tokens
from shared.messages.tokens import AcknowledgeEnds

_EVER_S = 1e9
_HEARTBEAT_S = 0.25
_TICK_S = 0.05
_GATEWAY = "bench"


@dataclass(frozen=True, slots=True)
class Request:
    """A request for `max_tokens` of answer, or fewer if one of `end_token_ids` occurs."""

    prompt: tuple[int, ...]
    max_tokens: int
    end_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Answered:
    """A request and its answer, in seconds on the loop's clock."""

    index: int
    sent_s: float
    tokens: list[int] = field(default_factory=list)
    first_s: float = 0.0
    ended_s: float = 0.0
    reason: str = ""

    @property
    def normalized_s(self) -> float:
        """Seconds per token of the answer, waiting included."""
        return (self.ended_s - self.sent_s) / max(1, len(self.tokens))


class Loop:
    """Runs repeatedly; between two runs its clock stops.

    `answers` are the ended ones; `tokens` counts all sampled tokens. Raises InternalError if the cores need
    something that the loop does not support.
    """

    def __init__(
        self,
        engine: TorchEngine,
        requests: Iterator[Request],
        *,
        clients: int,
        settings: PolicySettings,
        policy: str = "vllm",
        store: KvStore | None = None,
        clock: Clock = monotonic_s,
        ramp_s: float = 0.0,
        least_step_s: float = 0.0,
    ) -> None:
        """`ramp_s` is the time within which clients join one after the other. A step is drawn out to
        `least_step_s`, as on a device where it costs its weights."""
        self.engine = engine
        self.answers: list[Answered] = []
        self.tokens = self.steps = self.batch_sum = self.resyncs = 0
        self.ran_s = 0.0
        self._requests, self._numbers = requests, count()
        self._store, self._clock = store, clock
        self._open: dict[str, Answered] = {}
        self._began_s = clock()
        self._heartbeat_s = self._tick_s = -_EVER_S
        self._reports = 0
        self._core = _worker_core(engine, store)
        rules = Rules(
            settings=settings,
            round_s=0.0,
            valid_for_s=_EVER_S,
            worker_timeout_s=_EVER_S,
            gateway_timeout_s=_EVER_S,
            plan_grace_s=_EVER_S,
        )
        self._scheduler = SchedulerCore(rules, find_policy(policy), 1, 0.0)
        self._clients, self._ramp_s, self._least_step_s = clients, ramp_s, least_step_s

    @property
    def now_s(self) -> float:
        """Time spent in `run`."""
        return self.ran_s + self._clock() - self._began_s

    def run(self, duration_s: float, until: Callable[[], bool] = lambda: False) -> None:
        self._began_s = self._clock()
        ends_s = self.ran_s + duration_s
        while (now_s := self.now_s) < ends_s and not until():
            self._keep_clients(now_s)
            self._keep_in_touch(now_s)
            self._step()
        self.ran_s = self.now_s
        self._began_s = self._clock()

    def _keep_clients(self, now_s: float) -> None:
        is_joining = now_s < self._ramp_s
        clients = 1 + int(self._clients * now_s / self._ramp_s) if is_joining else self._clients
        while len(self._open) < clients:
            request = next(self._requests, None)
            if request is None:
                return
            self._submit(request, now_s)

    def _submit(self, request: Request, now_s: float) -> None:
        index = next(self._numbers)
        name = f"req_{index:08d}"
        sampling = Sampling(
            seed=0, max_tokens=request.max_tokens, temperature=0.0, end_token_ids=request.end_token_ids
        )
        spec = SequenceSpec(
            ref=SequenceRef(request_id=name, choice=0, attempt=1),
            gateway_id=_GATEWAY,
            gateway_incarnation=1,
            prompt=pack_tokens(request.prompt),
            sampling=sampling,
        )
        self._open[name] = Answered(index, now_s)
        _, effects = self._scheduler.on_submit(spec, now_s)
        self._carry_out(effects, now_s)

    def _keep_in_touch(self, now_s: float) -> None:
        if now_s - self._heartbeat_s >= _HEARTBEAT_S:
            self.beat()
        if now_s - self._tick_s >= _TICK_S:
            self._tick_s = now_s
            self._carry_out(self._scheduler.on_tick(now_s), now_s)

    def _step(self) -> None:
        if self._store is not None:
            self._store.transfers.settle()
        work, effects = self._core.begin_step(self.now_s)
        self._deliver(effects)
        if work is None:
            return
        began_s = self._clock()
        sampled = self.engine.step([row_of(item) for item in work.items])
        sleep(max(0.0, began_s + self._least_step_s - self._clock()))
        step_s = self._clock() - began_s
        self.steps += 1
        self.batch_sum += len(work.items)
        self._deliver(self._core.finish_step(work, sampled, self.now_s, step_s))

    def _deliver(self, effects: StepEffects) -> None:
        now_s = self.now_s
        for addressed in effects.frames:
            for delta in addressed.frame.deltas:
                answer = self._open[delta.request_id]
                answer.first_s = answer.first_s or now_s
                answer.tokens[delta.first_index :] = delta.tokens
                self.tokens += len(delta.tokens)
                if delta.finish_reason is not None:
                    answer.ended_s, answer.reason = now_s, delta.finish_reason
                    self.answers.append(self._open.pop(delta.request_id))
                    ref = SequenceRef(request_id=delta.request_id, choice=0, attempt=1)
                    self._core.on_acknowledge(AcknowledgeEnds(refs=(ref,), sender=_GATEWAY), now_s)
        for event in effects.stepped:
            self._carry_out(self._scheduler.on_stepped(event, now_s), now_s)

    def _carry_out(self, effects: list[Effect], now_s: float) -> None:
        for effect in effects:
            match effect:
                case SendPlan(plan=plan):
                    self._deliver(self._core.on_plan(plan, now_s))
                case AskPlacement(question=question, items=items):
                    places = ("worker-0",) * len(items)
                    self._carry_out(self._scheduler.on_placed(question, places, now_s), now_s)
                case AskSnapshot(epoch=epoch):
                    self.resyncs += 1
                    snapshot = self._numbered(self._core.on_snapshot(TakeSnapshot(epoch=epoch), now_s))
                    self._carry_out(self._scheduler.on_snapshot(snapshot, now_s), now_s)
                case SequenceLeft() | AskPrediction():
                    pass
                case _:
                    raise InternalError(f"the scheduler wants what cannot be had in a bench: {effect}")

    def _numbered(self, report: WorkerReported) -> WorkerReported:
        self._reports += 1
        return msgspec.structs.replace(report, seq=self._reports)

    def beat(self) -> None:
        """Send one heartbeat of the worker to the scheduler."""
        self._heartbeat_s = now_s = self.now_s
        report = self._numbered(self._core.report(now_s))
        self._carry_out(self._scheduler.on_worker_reported(report, now_s), now_s)

    def check_integrity(self) -> None:
        """Raises AssertionError if one of the cores is inconsistent."""
        self._core.check_integrity()
        self._scheduler.check_integrity()


def _worker_core(engine: TorchEngine, store: KvStore | None) -> StepCore:
    context_tokens = min(engine.max_positions, engine.kv_blocks * engine.block_tokens)
    limits = SequenceLimits(
        context_tokens, engine.vocabulary, end_retention_s=_EVER_S, gateway_timeout_s=_EVER_S
    )
    identity = Identity("worker-0", 1, "bench", context_tokens, "here")
    if store is None:
        return StepCore(identity, SequenceTable(engine.make_pool(), limits))
    return StepCore(identity, SequenceTable(store.cache, limits, Prefixes(store.cache, store.fingerprint)))
