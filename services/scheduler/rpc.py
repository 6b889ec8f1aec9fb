"""The questions of one term: placement, predictions, snapshots, tokens and blocks of moving sequences.

Each question is a task with a deadline; the core receives the answer or its absence.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from services.scheduler.config import SchedulerConfig
from services.scheduler.core.backlog import NO_QUESTION
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.effects import AskPlacement, AskPrediction, AskPull, AskSnapshot, AskTokens
from services.scheduler.recording import TermRecord
from shared import metrics, subjects
from shared.bus import Bus
from shared.bus.tracing import in_context
from shared.errors import InvalidMessage, KvasirError, PolicyFailed
from shared.log import get_logger
from shared.messages.commands import LengthPrediction, Placements, PlaceSequences, PredictLength, TakeSnapshot
from shared.messages.moves import BlocksPulled
from shared.messages.reports import WorkerReported
from shared.messages.sequence import SequenceRef
from shared.messages.tokens import FetchedTokens, FetchTokens

_Question = AskPlacement | AskPrediction | AskSnapshot | AskTokens | AskPull
_log = get_logger("scheduler")
_MAX_PREDICTIONS = 64
"""Maximum open predictions; beyond it a sequence gets none."""


class Questions:
    """Open questions. `ask` starts one, `close` cancels all; `feed` passes answers to the core."""

    def __init__(
        self,
        config: SchedulerConfig,
        bus: Bus,
        core: SchedulerCore,
        feed: Callable[..., None],
        model: str,
        record: TermRecord,
    ) -> None:
        """`core` is the one for `model`."""
        self._record = record
        self._config, self._bus, self._core, self._feed, self._model = config, bus, core, feed, model
        self._open: set[asyncio.Task[None]] = set()
        self._predictions = 0
        self._resyncs = metrics.counter("kvasir_scheduler_snapshots_total", "Snapshots asked for")

    def ask(self, question: _Question) -> None:
        match question:
            case AskPlacement():
                self._start(self._place(question), *(item.ref for item in question.items))
            case AskPrediction():
                if self._predictions < _MAX_PREDICTIONS:
                    self._predictions += 1
                    self._start(self._predict(question), question.ref)
            case AskSnapshot():
                self._resyncs.inc()
                self._start(self._snapshot(question))
            case AskTokens():
                self._start(self._tokens(question), question.ref)
            case AskPull():
                self._start(self._pull(question), question.ref)

    async def close(self) -> None:
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None], *about: SequenceRef) -> None:
        """Start a task within the span of the first of these sequences that has one."""
        context = None if self._record.spans is None else in_context(self._record.spans.within(about))
        task = asyncio.get_running_loop().create_task(work, context=context)
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _place(self, question: AskPlacement) -> None:
        command = PlaceSequences(
            items=question.items,
            excluded_workers=question.excluded_workers,
            withdrawn=question.withdrawn,
            ahead=question.ahead,
            model=self._model,
            are_placed=question.question == NO_QUESTION,
            waiting_tokens=question.waiting_tokens,
            step_tokens=self._config.token_budget,
        )
        worker_ids: tuple[str | None, ...] | None = None
        expected_tokens: tuple[int, ...] = ()
        try:
            reply = await self._bus.request(
                subjects.PLACEMENT_PLACE, command, Placements, deadline_s=self._config.place_deadline_s
            )
            worker_ids, expected_tokens = reply.worker_ids, reply.expected_tokens
            if question.question != NO_QUESTION:
                for item, worker_id in zip(question.items, worker_ids, strict=False):
                    if worker_id is not None:
                        self._record.placed(item.ref, worker_id)
        except PolicyFailed as error:
            self._feed(self._core.on_place_failed, question.question, error)
            return
        except KvasirError as error:
            _log.debug("placement did not answer: %s", error)
        on_placed = partial(self._core.on_placed, expected_tokens=expected_tokens)
        self._feed(on_placed, question.question, worker_ids)

    async def _tokens(self, question: AskTokens) -> None:
        me = self._bus.instance
        command = FetchTokens(ref=question.ref, sender=me, first_index=0)
        tokens: tuple[int, ...] | None = None
        try:
            answer = await self._bus.request(
                subjects.worker_fetch(question.worker_id, me),
                command,
                FetchedTokens,
                deadline_s=self._config.snapshot_deadline_s,
            )
            tokens = None if answer.delta is None else answer.delta.tokens
        except KvasirError as error:
            _log.info("%s did not say what %s has: %s", question.worker_id, question.ref, error)
        hear = self._core.on_shadow_tokens if question.is_shadow else self._core.on_tokens
        self._feed(hear, question.ref, tokens)

    async def _pull(self, question: AskPull) -> None:
        pulled: BlocksPulled | None = None
        try:
            pulled = await self._bus.request(
                subjects.worker_pull(question.worker_id),
                question.order,
                BlocksPulled,
                deadline_s=question.order.valid_for_s + self._config.snapshot_deadline_s,
            )
        except KvasirError as error:
            _log.info("%s did not fetch %s: %s", question.worker_id, question.ref, error)
        hear = self._core.on_shadow_pulled if question.order.is_shadow else self._core.on_pulled
        self._feed(hear, question.ref, pulled)

    async def _predict(self, question: AskPrediction) -> None:
        command = PredictLength(
            ref=question.ref,
            prompt=question.prompt,
            max_tokens=question.max_tokens,
            generated_tokens=question.generated_tokens,
            model=question.model,
        )
        try:
            prediction = await self._bus.request(
                subjects.PREDICTOR_PREDICT,
                command,
                LengthPrediction,
                deadline_s=self._config.predict_deadline_s,
            )
        except KvasirError as error:
            _log.debug("no prediction for %s: %s", question.ref, error)
            return
        finally:
            self._predictions -= 1
        self._record.predicted(question.ref, prediction)
        self._feed(self._core.on_predicted, question.ref, prediction)

    async def _snapshot(self, question: AskSnapshot) -> None:
        _log.info("asking %s for a snapshot: %s", question.worker_id, question.reason)
        try:
            snapshot = await self._bus.request(
                subjects.worker_snapshot(question.worker_id),
                TakeSnapshot(epoch=question.epoch),
                WorkerReported,
                deadline_s=self._config.snapshot_deadline_s,
            )
            if snapshot.worker_id != question.worker_id:
                raise InvalidMessage(f"{question.worker_id} answers as {snapshot.worker_id!r}")
        except KvasirError as error:
            _log.info("no snapshot of %s: %s", question.worker_id, error)
            self._feed(self._core.on_snapshot_failed, question.worker_id)
        else:
            self._feed(self._core.on_snapshot, snapshot)
