"""Batches concurrent predictions into one call of the model, in a thread of its own.

Requests that arrive during a call form the next batch; a request that finds none waiting runs at once. All
access to the model (predictions, samples, new versions) happens in that thread, in order. Queues are bounded:
beyond `queue_limit` a request is refused and the oldest sample dropped.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from services.predictor.core.length_model import LengthModel, LengthQuery, LengthSample, PredictedLength
from services.predictor.core.report import predict_all
from shared.clock import monotonic_s
from shared.errors import NoResponder, Overloaded
from shared.plugins import PluginFaults

Answer = asyncio.Future[PredictedLength]


@dataclass
class Batcher:
    """Queues predictions, samples and changes for the model's thread. `run` must be running."""

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
