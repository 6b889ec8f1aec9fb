"""Several models in one fleet: each has a cell, with its own core and its own questions to other services.

Workers of one model share a queue, batches, moves and loans; models do not affect each other.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from services.scheduler.core import effects
from services.scheduler.core.backlog import NO_QUESTION
from services.scheduler.core.core import SchedulerCore
from services.scheduler.reporting import TermReport
from shared import metrics, subjects
from shared.bus import Bus
from shared.bus.tracing import in_context
from shared.errors import (
    DeadlineExceeded,
    KvasirError,
    NoResponder,
    Overloaded,
    PolicyFailed,
    UnavailableError,
)
from shared.log import get_logger
from shared.messages.base import Message
from shared.messages.commands import LengthPrediction, Placements, PlaceSequences, PredictLength, TakeSnapshot
from shared.messages.moves import BlocksPulled
from shared.messages.reports import WorkerReported
from shared.messages.tokens import FetchedTokens, FetchTokens
from shared.shards import WHOLE, Shard

_log = get_logger("scheduler")
R = TypeVar("R", bound=Message)
MOST_MODELS = 64
_RETRY_S = 1.0
_MAX_PREDICTIONS = 64
"""Maximum open predictions; beyond it a sequence gets none."""
_PLACEMENT_S = 0.2
"""Deadline of placement; then the least loaded worker is taken."""
_ANSWER_S = 1.0
"""Deadline of a prediction, for which nothing waits."""
_SNAPSHOT_S = 2.0
"""Deadline of a worker's snapshot or tokens, in seconds."""


class Cell:
    """The core of one model and its open questions: each is a task with a deadline."""

    def __init__(
        self,
        model: str,
        core: SchedulerCore,
        bus: Bus,
        feed: Callable[..., None],
        report: TermReport,
        step_tokens: int,
        shard: Shard = WHOLE,
    ) -> None:
        """`feed(cell, on_event, *event)` passes an answer to the core. `step_tokens`: a step's budget."""
        self.model, self.core = model, core
        self._bus, self._feed, self._report = bus, feed, report
        self._step_tokens, self._shard = step_tokens, shard
        self._open: set[asyncio.Task[None]] = set()
        self._predictions = 0
        self._resyncs = metrics.counter("kvasir_scheduler_snapshots_total", "Snapshots asked for")

    def ask(self, question: effects.Effect) -> None:
        """Start a question; ignore any other effect."""
        match question:
            case effects.AskPlacement():
                self._start(self._place(question), question.items)
            case effects.AskPrediction() if self._predictions < _MAX_PREDICTIONS:
                self._predictions += 1
                self._start(self._predict(question), (question,))
            case effects.AskSnapshot():
                self._resyncs.inc()
                self._start(self._snapshot(question))
            case effects.AskTokens():
                self._start(self._tokens(question), (question,))
            case effects.AskPull():
                self._start(self._pull(question), (question,))

    async def close(self) -> None:
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None], about: Sequence[Any] = ()) -> None:
        """Start a task within the span of the first sequence that has one; `about`: things with a `ref`."""
        spans = self._report.spans
        context = None if spans is None else in_context(spans.within(one.ref for one in about))
        task = asyncio.get_running_loop().create_task(work, context=context)
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _place(self, question: effects.AskPlacement) -> None:
        command = PlaceSequences(
            items=question.items,
            excluded_workers=question.excluded_workers,
            withdrawn=question.withdrawn,
            ahead=question.ahead,
            model=self.model,
            are_placed=question.question == NO_QUESTION,
            waiting_tokens=question.waiting_tokens,
            step_tokens=self._step_tokens,
            shard=self._shard.number,
            shards=self._shard.count,
        )
        worker_ids: tuple[str | None, ...] | None = None
        expected_tokens: tuple[int, ...] = ()
        try:
            reply = await self._bus.request(
                subjects.PLACEMENT_PLACE, command, Placements, deadline_s=_PLACEMENT_S
            )
            worker_ids, expected_tokens = reply.worker_ids, reply.expected_tokens
            if question.question != NO_QUESTION:
                for item, worker_id in zip(question.items, worker_ids, strict=False):
                    if worker_id is not None:
                        self._report.placed(item.ref, worker_id)
        except PolicyFailed as error:
            self._feed(self, self.core.on_place_failed, question.question, error)
            return
        except (DeadlineExceeded, NoResponder) as error:
            _log.debug("placement did not answer: %s", error)
            self._feed(self, self.core.on_unplaced, question.question)
            return
        except KvasirError as error:
            _log.debug("placement did not answer: %s", error)
        on_placed = partial(self.core.on_placed, expected_tokens=expected_tokens)
        self._feed(self, on_placed, question.question, worker_ids)

    async def _answer(
        self, subject: str, command: Message, reply_type: type[R], deadline_s: float, about: object
    ) -> R | None:
        """Return the answer, None if there is none in time."""
        try:
            return await self._bus.request(subject, command, reply_type, deadline_s=deadline_s)
        except KvasirError as error:
            _log.info("no %s for %s: %s", reply_type.__name__, about, error)
            return None

    async def _tokens(self, question: effects.AskTokens) -> None:
        me, ref = self._bus.instance, question.ref
        subject = subjects.worker_fetch(question.worker_id, me)
        command = FetchTokens(ref=ref, sender=me, first_index=0)
        answer = await self._answer(subject, command, FetchedTokens, _SNAPSHOT_S, ref)
        hear = partial(self.core.on_tokens, is_shadow=question.is_shadow)
        self._feed(self, hear, ref, answer and answer.delta and answer.delta.tokens)

    async def _pull(self, question: effects.AskPull) -> None:
        subject, order = subjects.worker_pull(question.worker_id), question.order
        deadline_s = order.valid_for_s + _SNAPSHOT_S
        pulled = await self._answer(subject, order, BlocksPulled, deadline_s, question.ref)
        hear = partial(self.core.on_pulled, is_shadow=order.is_shadow)
        self._feed(self, hear, question.ref, pulled)

    async def _predict(self, question: effects.AskPrediction) -> None:
        command = PredictLength(
            ref=question.ref,
            prompt=question.prompt,
            max_tokens=question.max_tokens,
            generated_tokens=question.generated_tokens,
            model=question.model,
        )
        try:
            prediction = await self._bus.request(
                subjects.PREDICTOR_PREDICT, command, LengthPrediction, deadline_s=_ANSWER_S
            )
        except KvasirError as error:
            _log.debug("no prediction for %s: %s", question.ref, error)
            return
        finally:
            self._predictions -= 1
        self._report.predicted(question.ref, prediction)
        self._feed(self, self.core.on_predicted, question.ref, prediction)

    async def _snapshot(self, question: effects.AskSnapshot) -> None:
        name = question.worker_id
        _log.info("asking %s for a snapshot: %s", name, question.reason)
        subject, command = subjects.worker_snapshot(name), TakeSnapshot(epoch=question.epoch)
        snapshot = await self._answer(subject, command, WorkerReported, _SNAPSHOT_S, name)
        if snapshot is None or snapshot.worker_id != name:
            self._feed(self, self.core.on_snapshot_failed, name)
        else:
            self._feed(self, self.core.on_snapshot, snapshot)


def merged(descriptions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return descriptions for people as one: numbers added, rows concatenated."""
    found: dict[str, Any] = {}
    for described in descriptions:
        for name, value in described.items():
            if name in ("standstill_s", "foreseen_wait_s", "epoch"):
                found[name] = max(found.get(name, 0.0), value)
            elif isinstance(value, str):
                found[name] = found.get(name) or value
            else:
                found[name] = found[name] + value if name in found else value
    return found


class Cells:
    """Cells by model, created with the first worker or sequence; empty ones go when there are too many."""

    def __init__(self, make: Callable[[str], Cell]) -> None:
        self._make = make
        self.by_model: dict[str, Cell] = {}
        self._model_of: dict[str, str] = {}
        """By worker."""

    def __iter__(self) -> Iterator[Cell]:
        return iter(list(self.by_model.values()))

    def of_model(self, model: str) -> Cell:
        """Return the model's cell, created if needed. Raises Overloaded for too many models, UnavailableError
        for an empty name unless exactly one model is known."""
        if not model:
            if len(self.by_model) != 1:
                text = (
                    "it names no model, and there are several: name it" if self.by_model else "no worker yet"
                )
                raise UnavailableError(text, retry_after_s=_RETRY_S)
            return next(iter(self.by_model.values()))
        known = self.by_model.get(model)
        if known is None:
            self._make_room()
            known = self.by_model[model] = self._make(model)
        return known

    def of_report(self, worker_id: str, model: str) -> Cell:
        """Return the cell of a worker's reported model. Raises like `of_model`."""
        cell = self.of_model(model)
        self._model_of[worker_id] = model
        return cell

    def of_worker(self, worker_id: str) -> Cell | None:
        """Return the worker's cell, or None if it never reported."""
        return self.by_model.get(self._model_of.get(worker_id, ""))

    def describe(self) -> dict[str, Any]:
        """Return the cores' descriptions for people: numbers added, rows concatenated."""
        found: list[dict[str, Any]] = [{"snapshots": 0, "standstill_s": 0.0, "workers": [], "queue": []}]
        for cell in self:
            described = cell.core.describe()
            if len(self.by_model) > 1:
                for name in described.keys() & {"workers", "queue"}:
                    described[name] = [{**row, "model": cell.model} for row in described[name]]
            found.append(described)
        return merged(found)

    def _make_room(self) -> None:
        if len(self.by_model) < MOST_MODELS:
            return
        idle = next((cell for cell in self if cell.core.is_empty), None)
        if idle is None:
            raise Overloaded(f"there are {MOST_MODELS} models already", retry_after_s=_RETRY_S)
        del self.by_model[idle.model]
        self._model_of = {name: model for name, model in self._model_of.items() if model != idle.model}
