"""The predictor on the bus: answers `PredictLength` and learns from `SequenceFinished`.

Each served model has a length model of its own, because answer lengths and token ids differ between models.
Once workers send hidden states of running answers (`WorkerObserved`), it publishes revised lengths. State is
soft: a restart begins with the latest trained version, or the prior.
"""

import asyncio
import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from services.predictor.config import PredictorConfig
from services.predictor.core.length_model import LengthModel, LengthQuery, LengthSample, PredictedLength
from services.predictor.core.report import PredictionAudit, predict_all
from services.predictor.learning import Learner
from services.predictor.models import FIXED, create
from services.predictor.revising import Reviser
from shared import subjects
from shared.bus import Bus, Endpoint, Handler, Listener, fenced, recorder_handlers, status_handlers, status_of
from shared.clock import monotonic_s
from shared.errors import InvalidRequest, NoResponder, Overloaded
from shared.log import canonical, get_logger
from shared.messages.base import Empty
from shared.messages.commands import LengthPrediction, PredictLength
from shared.messages.lengths import LengthsRevised, WorkerObserved
from shared.messages.reports import SequenceFinished, ServiceStatus
from shared.messages.sequence import FinishReason
from shared.plugins import PluginFaults

if TYPE_CHECKING:  # imports torch, which the other models do not need
    from services.predictor.models.regressor import RegressorModel

HANDLERS: tuple[Handler, ...] = (
    Endpoint(subjects.PREDICTOR_PREDICT, PredictLength, "predict", concurrency=512, queue="predictor"),
    Listener(subjects.GATEWAY_FINISHED, SequenceFinished, "learn"),
    Listener(subjects.ANY_WORKER_OBSERVED, WorkerObserved, "observe", sender="worker_id"),
    *status_handlers("predictor"),
)
MOST_MODELS = 16
"""Maximum named models; further ones use the common length model."""

_log = get_logger("predictor")

Answer = asyncio.Future[PredictedLength]


@dataclass
class Batcher:
    """Batches concurrent predictions into one call of the model, in its own thread; `run` must be running.

    Requests that arrive during a call form the next batch; one that finds none waiting runs at once. All
    access to the model (predictions, samples, new versions) happens in that thread, in order. Queues are
    bounded: beyond `queue_limit` a request is refused and the oldest sample dropped.
    """

    model: LengthModel
    batch_limit: int = 64
    """Maximum predictions of one call."""
    queue_limit: int = 2048
    batches: int = 0
    """Number of model calls so far."""
    faults: PluginFaults = field(default_factory=PluginFaults)
    _questions: deque[tuple[LengthQuery, Answer]] = field(default_factory=deque)
    _lessons: deque[LengthSample] = field(init=False)
    _orders: deque[Callable[[], None]] = field(default_factory=deque)
    _work: asyncio.Event = field(default_factory=asyncio.Event)
    _is_over: bool = False

    def __post_init__(self) -> None:
        self._lessons = deque(maxlen=self.queue_limit)

    async def predict(self, query: LengthQuery) -> PredictedLength:
        """Return a prediction. Raises Overloaded, PolicyFailed (the model failed), NoResponder (shutdown)."""
        if self._is_over:
            raise _ending()
        if len(self._questions) >= self.queue_limit:
            raise Overloaded(f"{self.queue_limit} predictions wait already; go on without one")
        answer: Answer = asyncio.get_running_loop().create_future()
        self._questions.append((query, answer))
        self._work.set()
        return await answer

    def observe(self, sample: LengthSample) -> None:
        """Queue a sample; the model learns it before the next prediction."""
        self._lessons.append(sample)
        self._work.set()

    def call(self, change: Callable[[], None]) -> None:
        """Call `change`, which may modify the model, between two batches."""
        self._orders.append(change)
        self._work.set()

    async def run(self) -> None:
        """Process the queues until cancelled; open requests then fail."""
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        try:
            while True:
                await self._work.wait()
                await asyncio.sleep(0)
                self._work.clear()
                await self._round(loop, thread)
        finally:
            self._is_over = True
            _fail(self._questions, _ending())
            thread.shutdown(wait=False, cancel_futures=True)

    async def _round(self, loop: asyncio.AbstractEventLoop, thread: ThreadPoolExecutor) -> None:
        lessons, orders = list(self._lessons), list(self._orders)
        self._lessons.clear()
        self._orders.clear()
        size = min(self.batch_limit, len(self._questions))
        asked: list[tuple[LengthQuery, Answer]] = []
        queries: list[LengthQuery] = []
        for _ in range(size):
            query, answer = self._questions.popleft()
            if not answer.done():
                asked.append((query, answer))
                queries.append(query)
        if self._questions:
            self._work.set()
        try:
            told = await loop.run_in_executor(thread, self._in_thread, lessons, orders, queries)
        except Exception as error:
            name = f"length model {self.model.name}"
            _fail(asked, self.faults.note(name, "predict or observe", error, monotonic_s()))
            return
        except BaseException:
            _fail(asked, _ending())
            raise
        self.batches += bool(queries)
        for (_, answer), predicted in zip(asked, told, strict=True):
            if not answer.done():
                answer.set_result(predicted)

    def _in_thread(
        self, lessons: list[LengthSample], orders: list[Callable[[], None]], queries: list[LengthQuery]
    ) -> list[PredictedLength]:
        for order in orders:
            order()
        for sample in lessons:
            self.model.observe(sample)
        told = predict_all(self.model, queries) if queries else []
        for one in told:
            if not isinstance(one, PredictedLength):
                raise TypeError("it returned something else than a PredictedLength")
        return told


def _fail(asked: Iterable[tuple[LengthQuery, Answer]], failure: Exception) -> None:
    """Fail open requests, whose callers were not cancelled."""
    for _, answer in asked:
        if not answer.done():
            answer.set_exception(failure)


def _ending() -> NoResponder:
    return NoResponder("this predictor ends: go on without a prediction")


@dataclass
class ServedLengths:
    """Length model of one served model, its learner and its accuracy."""

    batcher: Batcher
    learner: Learner | None = None
    audit: PredictionAudit = field(default_factory=PredictionAudit)

    def summary(self) -> dict[str, Any]:
        """Return the fields for `status`."""
        learned = {} if self.learner is None else self.learner.summary()
        return {"model_version": self.batcher.model.version, **self.audit.summary(), **learned}


class ServedModels:
    """`ServedLengths` by served model, created when a message first names it. `run` must be running."""

    def __init__(self, config: PredictorConfig) -> None:
        """Create the common model. Raises ConfigError for an unknown length model."""
        self._config = config
        self._tasks: asyncio.TaskGroup | None = None
        self.common = self._made(config.state_dir)
        """For requests that name no model; the reviser shares its thread."""
        self._named: dict[str, ServedLengths] = {}

    async def run(self) -> None:
        """Run batchers and learners until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            for lengths in {id(one.batcher): one for one in (self.common, *self._named.values())}.values():
                self._start(lengths)
            await asyncio.Event().wait()

    def of(self, name: str) -> ServedLengths:
        """Return the lengths of a served model; without a name the only one, else the common one."""
        if not name and len(self._named) == 1:
            (only,) = self._named.values()
            return only
        known = self._named.get(name)
        if known is not None or not name or len(self._named) >= MOST_MODELS:
            return known or self.common
        if self._config.model in FIXED:
            made = ServedLengths(self.common.batcher)
        else:
            directory = self._config.state_dir
            made = self._made(None if directory is None else directory / folder_of(name))
            self._start(made)
        self._named[name] = made
        canonical(_log, "lengths of a model", served=name, version=made.batcher.model.version)
        return made

    def summary(self) -> dict[str, Any]:
        """Return the fields for `status`: those of the only model, or sums with a row per model."""
        named = self._named or {"": self.common}
        batchers = {id(one.batcher): one.batcher for one in (self.common, *named.values())}
        shown = {name: one.summary() for name, one in named.items()}
        now_s = monotonic_s()
        details: dict[str, Any] = {
            "model": self.common.batcher.model.name,
            "trouble": next(filter(None, (each.faults.text(now_s) for each in batchers.values())), ""),
            "batches": sum(batcher.batches for batcher in batchers.values()),
        }
        if len(shown) == 1:
            return details | next(iter(shown.values()))
        for name in ("predictions", "finished", "scored"):
            details[name] = sum(each.get(name, 0) for each in shown.values())
        return details | {"models": [{"model": name, **each} for name, each in shown.items()]}

    def _made(self, directory: Path | None) -> ServedLengths:
        """Create a length model from its own trained version, else from the one in `state_dir`."""
        config = self._config
        settings = config.model_settings()
        model = create(config.model, replace(settings, state_dir=directory))
        if directory not in (None, config.state_dir) and getattr(model, "trained", model) is None:
            model = create(config.model, settings)
        batcher = Batcher(model)
        return ServedLengths(batcher, learner_for(config, batcher, directory))

    def _start(self, lengths: ServedLengths) -> None:
        if self._tasks is None:
            return  # `run` starts it.
        self._tasks.create_task(lengths.batcher.run())
        if lengths.learner is not None:
            self._tasks.create_task(lengths.learner.run())


def learner_for(config: PredictorConfig, batcher: Batcher, directory: Path | None) -> Learner | None:
    """Return a learner for a regressor with a directory, else None."""
    if directory is None or not config.learn or config.model != "regressor":
        return None
    return Learner(cast("RegressorModel", batcher.model), batcher.call, directory)


def folder_of(name: str) -> str:
    """Return a readable folder name, unique per model name."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:40]
    return f"{readable}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


class Predictor:
    """Message handlers: predict with the length model of the served model, and train it."""

    def __init__(self, bus: Bus, served: ServedModels, reviser: Reviser | None = None) -> None:
        self._bus, self._served, self._reviser = bus, served, reviser
        self._revising: Reviser | None = None
        """The reviser, once workers send hidden states."""
        self._started_s = monotonic_s()

    async def predict(self, asked: PredictLength) -> LengthPrediction:
        """Predict an answer's length. Raises InvalidRequest (`max_tokens` below 1) and Overloaded."""
        if asked.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        lengths = self._served.of(asked.model)
        generated_tokens = max(0, asked.generated_tokens)
        query = LengthQuery(asked.prompt, asked.max_tokens, generated_tokens)
        predicted = await lengths.batcher.predict(query)
        if generated_tokens == 0:
            lengths.audit.on_predicted(asked.ref.key, predicted)
        return LengthPrediction(model_version=lengths.batcher.model.version, **vars(predicted))

    def learn(self, finished: SequenceFinished) -> None:
        """Learn from an answer that ended by itself or at its limit; ignore other ends."""
        teaches = finished.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if not teaches or finished.output_tokens < 1:
            self._served.of(finished.model).audit.forget(finished.ref.key)
            if self._revising is not None:
                self._revising.forget(finished.ref.key)
            return
        censored = finished.finish_reason is FinishReason.LENGTH
        if self._revising is not None:
            self._revising.finish(finished.ref.key, finished.output_tokens, censored=censored)
        sample = LengthSample(finished.prompt, finished.output_tokens, censored)
        lengths = self._served.of(finished.model)
        lengths.batcher.observe(sample)
        if lengths.learner is not None:
            lengths.learner.observe(sample)
        lengths.audit.on_finished(finished.ref.key, finished.output_tokens, censored=censored)

    def observe(self, event: WorkerObserved) -> None:
        """Pass hidden states of running answers to the reviser."""
        self._revising = self._reviser
        if self._revising is not None:
            self._revising.observe(event)

    async def tell(self) -> None:
        """Publish revised lengths until cancelled. A lost message costs only accuracy."""
        me = self._bus.instance
        while self._reviser is not None:
            lengths = await self._reviser.revised.get()
            if self._bus.connected:
                with fenced("revised lengths"):
                    message = LengthsRevised(predictor_id=me, lengths=lengths)
                    await self._bus.publish(subjects.predictor_revised(me), message)

    async def status(self, _: Empty) -> ServiceStatus:
        """Return what `python -m services status` shows."""
        details = self._served.summary() | ({} if self._reviser is None else self._reviser.summary())
        return status_of(self._bus, "predictor", monotonic_s() - self._started_s, details)


async def run(config: PredictorConfig) -> None:
    """Serve until cancelled. Raises ConfigError (unknown model) and BusUnavailable (no NATS at start)."""
    served = ServedModels(config)
    common = served.common.batcher
    reviser = None if config.rest_head == "none" else Reviser(common.call, config.rest_head, config.state_dir)
    bus = await Bus.connect(config.bus, service="predictor", instance=config.instance)
    try:
        async with asyncio.TaskGroup() as tasks, bus.served_within():
            tasks.create_task(served.run())
            predictor = Predictor(bus, served, reviser)
            await bus.attach(HANDLERS, predictor)
            await bus.attach(recorder_handlers("predictor"), bus.recorder)
            tasks.create_task(predictor.tell())
            canonical(_log, "predictor serving", model=config.model, version=common.model.version)
            await asyncio.Event().wait()
    finally:
        if reviser is not None:
            reviser.save()
        await bus.close()
