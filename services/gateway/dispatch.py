"""Carries out effects of streams: submissions and fetches as tasks, small messages through the outbox."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from services.gateway.config import GatewayConfig
from services.gateway.core.stream import (
    Acknowledge,
    Cancel,
    Extend,
    Fetch,
    StreamEffect,
    StreamEffects,
    Submit,
)
from services.gateway.counters import Counters
from services.gateway.exchange import OpenChoice
from shared import log, metrics, subjects
from shared.bus import Bus, fenced
from shared.clock import Clock
from shared.errors import InternalError, KvasirError, UnavailableError
from shared.messages.commands import CancelSequence, SubmitReply, SubmitSequence
from shared.messages.prefixes import ForgetPrefixes, PrefixesForgotten
from shared.messages.sequence import SequenceRef
from shared.messages.tokens import AcknowledgeEnds, ExtendSequence, FetchedTokens, FetchTokens

MAX_MESSAGES = 10_000


class NoticeOutbox:
    """Queue of small messages, filled by handlers that must not wait and emptied by `run`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._messages: deque[tuple[str, msgspec.Struct]] = deque(maxlen=MAX_MESSAGES)
        self._ended: dict[str, dict[SequenceRef, None]] = {}
        self._filled = asyncio.Event()
        self._dropped = metrics.counter(
            "kvasir_gateway_outbox_dropped_total", "Small messages that could not be sent", ("reason",)
        )

    def put(self, subject: str, message: msgspec.Struct) -> None:
        if len(self._messages) == MAX_MESSAGES:
            self._dropped.labels("full").inc()
        self._messages.append((subject, message))
        self._filled.set()

    def acknowledge(self, worker_id: str, ref: SequenceRef) -> None:
        """Queue an acknowledgement; one message per worker carries all that are pending."""
        refs = self._ended.setdefault(worker_id, {})
        if len(refs) < MAX_MESSAGES:
            refs[ref] = None
        self._filled.set()

    async def run(self) -> None:
        while True:
            await self._filled.wait()
            await self.flush()

    async def flush(self) -> None:
        self._filled.clear()
        while self._messages:
            await self._send(*self._messages.popleft())
        while self._ended:
            worker_id, refs = self._ended.popitem()
            subject = subjects.worker_acknowledge(worker_id, self._bus.instance)
            await self._send(subject, AcknowledgeEnds(refs=tuple(refs), sender=self._bus.instance))

    async def _send(self, subject: str, message: msgspec.Struct) -> None:
        try:
            await self._bus.publish(subject, message)
        except KvasirError as error:
            self._dropped.labels(error.code).inc()
            _logger.warning("not sent to %s: %s", subject, error)


MAX_AT_ONCE = 256
_FORGET_S = 10.0
"""Seconds for a worker to end its step and empty its prefix cache."""
_COMMAND = "command of a sequence"
"""Label of a fenced task: an error affects one sequence, whose stream times out by itself."""
_logger = log.get_logger("gateway.dispatch")

Apply = Callable[[OpenChoice, StreamEffects], None]


class Dispatch:
    """Sends commands; passes the effects of their outcome to `apply`."""

    def __init__(
        self,
        config: GatewayConfig,
        bus: Bus,
        tasks: asyncio.TaskGroup,
        now_s: Clock,
        counters: Counters,
        apply: Apply,
    ) -> None:
        self._config = config
        self._bus = bus
        self._tasks = tasks
        self._now_s = now_s
        self._counters = counters
        self._apply = apply
        self._at_once = asyncio.Semaphore(MAX_AT_ONCE)
        self.outbox = NoticeOutbox(bus)
        self.heartbeats = 0

    def carry_out(self, sequence: OpenChoice, effect: StreamEffect) -> None:
        """Start an effect; never waits."""
        if isinstance(effect, Submit):
            self._tasks.create_task(self._submit(sequence, effect), context=sequence.exchange.context)
        elif isinstance(effect, Fetch):
            self._tasks.create_task(self._fetch(sequence, effect), context=sequence.exchange.context)
        else:
            self.tell(effect)

    def tell(self, effect: Acknowledge | Cancel | Extend) -> None:
        """Queue a small message. If it is lost, a heartbeat that shows so triggers another."""
        me = self._bus.instance
        if isinstance(effect, Acknowledge):
            self.outbox.acknowledge(effect.worker_id, effect.ref)
        elif isinstance(effect, Extend):
            late = ExtendSequence(
                ref=effect.ref, sender=me, first_index=effect.first_index, tokens=effect.tokens
            )
            self.outbox.put(subjects.worker_extend(effect.worker_id, me), late)
        else:
            command = CancelSequence(ref=effect.ref, sender=me)
            if effect.worker_id is not None:
                self.outbox.put(subjects.worker_cancel(effect.worker_id, me), command)
            if effect.is_final:
                self.outbox.put(subjects.scheduler_cancel(me), command)

    async def forget_prefixes(self, workers: Sequence[str]) -> dict[str, int]:
        """Empty the workers' prefix caches; return the number of blocks each dropped. Raises UnavailableError
        naming the first worker that did not confirm."""
        me = self._bus.instance

        async def ask(worker_id: str) -> int:
            subject, command = subjects.worker_forget(worker_id, me), ForgetPrefixes(sender=me)
            try:
                answer = await self._bus.request(subject, command, PrefixesForgotten, deadline_s=_FORGET_S)
            except KvasirError as error:
                text = f"{worker_id} did not empty its prefix cache: {error.message}"
                raise UnavailableError(text) from error
            return answer.blocks

        try:
            async with asyncio.TaskGroup() as asked:
                answers = {worker_id: asked.create_task(ask(worker_id)) for worker_id in workers}
        except* UnavailableError as group:
            raise group.exceptions[0] from None
        return {worker_id: answer.result() for worker_id, answer in answers.items()}

    async def _submit(self, sequence: OpenChoice, effect: Submit) -> None:
        with fenced(_COMMAND):
            stream = sequence.stream
            async with self._at_once:
                if not stream.is_open or stream.attempt != effect.attempt:
                    return
                try:
                    spec = sequence.spec(self._bus.instance, self._bus.incarnation, self._now_s())
                    command, deadline_s = SubmitSequence(spec=spec), self._config.submit_deadline_s
                    self.note("submit", stream.ref, causes=dict(stream.handovers), tokens=len(stream.tokens))
                    subject = subjects.scheduler_submit(self._bus.instance)
                    await self._bus.request(subject, command, SubmitReply, deadline_s=deadline_s)
                except Exception as error:
                    known = _known(error)
                    self._counters.submits.labels(known.code).inc()
                    self.note("refused", stream.ref, error=known.code)
                    effects = stream.on_submit_failed(effect.serial, known, self._now_s())
                else:
                    self._counters.submits.labels("taken").inc()
                    self.note("taken", stream.ref)
                    effects = stream.on_submitted(effect.serial, self._now_s())
            self._apply(sequence, effects)

    def note(self, kind: str, ref: SequenceRef, **fields: Any) -> None:
        self._bus.recorder.note(kind, ref.request_id, choice=ref.choice, attempt=ref.attempt, **fields)

    async def _fetch(self, sequence: OpenChoice, effect: Fetch) -> None:
        with fenced(_COMMAND):
            self._counters.fetches.inc()
            self.note("fetch", effect.ref, worker=effect.worker[0], held=effect.first_index)
            me = self._bus.instance
            subject = subjects.worker_fetch(effect.worker[0], me)
            question = FetchTokens(ref=effect.ref, sender=me, first_index=effect.first_index)
            try:
                answer = await self._bus.request(
                    subject, question, FetchedTokens, deadline_s=self._config.fetch_deadline_s
                )
            except Exception as error:
                _known(error)
                effects = sequence.stream.on_fetch_failed(effect.ref, self._now_s())
            else:
                effects = sequence.stream.on_fetched(effect.ref, answer.delta, effect.worker, self._now_s())
            self._apply(sequence, effects)


def _known(error: Exception) -> KvasirError:
    """Return the error if typed; otherwise log its traceback and return an InternalError."""
    if isinstance(error, KvasirError):
        return error
    _logger.error("a command failed in an unforeseen way", exc_info=error)
    return InternalError(f"{type(error).__name__}: {error}")
