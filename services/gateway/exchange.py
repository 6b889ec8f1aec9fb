"""One HTTP request: its sequences, its deadline and its wake-up event. `Dispatch` carries out the effects of
its streams: submissions and fetches as tasks, small messages through the outbox."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec

from services.gateway.config import GatewayConfig
from services.gateway.core.stream import (
    Acknowledge,
    Cancel,
    Extend,
    Fetch,
    Stream,
    StreamEffect,
    StreamEffects,
    StreamPhase,
    Submit,
)
from services.gateway.core.views import ShardViews
from services.gateway.counters import Counters, ModelFigures
from shared import log, metrics, spans, subjects
from shared.bus import Bus, fenced
from shared.clock import Clock, monotonic_s
from shared.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KvasirError,
    NoResponder,
    NotLeader,
    UnavailableError,
)
from shared.messages.commands import CancelSequence, SubmitReply, SubmitSequence
from shared.messages.prefixes import ForgetPrefixes, PrefixesForgotten
from shared.messages.reports import SequenceHandedOver
from shared.messages.sequence import (
    NOBODY,
    TOKEN_BYTES,
    Sampling,
    SequenceRef,
    SequenceSpec,
    Tenant,
    pack_tokens,
)
from shared.messages.shadows import AnswerSoFar
from shared.messages.tokens import AcknowledgeEnds, ExtendSequence, FetchedTokens, FetchTokens

HEADER = "X-Request-Timeout"


@dataclass(frozen=True, slots=True)
class Legacy:
    """State that lets a request outlive its gateway."""

    heir_key: bytes = b""
    """Secret that another gateway takes the request over with."""
    so_far: tuple[AnswerSoFar, ...] = ()
    waited_s: float = 0.0
    """Seconds since another gateway accepted the request."""
    is_resumed: bool = False
    """Another gateway began the request, so overload does not refuse it."""


NO_LEGACY = Legacy()


@dataclass(frozen=True, slots=True)
class Deadline:
    """Time limit for the whole answer, counted from the request's headers; none without `timeout_s`."""

    began_s: float = 0.0
    timeout_s: float | None = None

    def remaining_s(self) -> float | None:
        """Seconds left, at least 0; None without a deadline."""
        if self.timeout_s is None:
            return None
        return max(0.0, self.began_s + self.timeout_s - monotonic_s())

    def error(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the answer was not complete within the {self.timeout_s:g} s asked for")

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Cancel the block at the deadline and raise DeadlineExceeded."""
        try:
            async with asyncio.timeout(self.remaining_s()) as limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise self.error() from None


NONE = Deadline()


def deadline_of(header: str | None, default_s: float | None, longest_s: float, began_s: float) -> Deadline:
    """Return the deadline from `X-Request-Timeout`, else from the configuration. Raises InvalidRequest unless
    the header is a number of seconds above 0 and up to `longest_s`."""
    if header is None:
        return Deadline(began_s, default_s)
    try:
        timeout_s = float(header)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s <= longest_s:
        text = f"{HEADER} should be a number of seconds above 0 and at most {longest_s:g}"
        raise InvalidRequest(text, param=HEADER)
    return Deadline(began_s, timeout_s)


ALONE_AFTER, REFUSED_AFTER = 2, 3
"""Number of workers' deaths after which a request runs alone, and after which it fails."""
SILENT_DEATH = 0.5
"""Weight of a worker that is only silent: the network may be at fault."""
_logger = log.get_logger("gateway.exchange")


@dataclass(slots=True, eq=False)
class OpenChoice:
    """A stream and the data to submit it again."""

    stream: Stream
    prompt: bytes
    sampling: Sampling
    exchange: "Exchange"
    heard_s: float = 0.0
    deaths: float = 0.0
    """Number of workers that died while they ran it."""
    shard: int | None = None
    """Shard to which it is submitted; None: not chosen yet."""
    is_bound: bool = False
    """Whether a scheduler has named that shard."""
    stopped_tokens: int | None = None
    """Length of the answer when its stop string was complete."""
    _terms: tuple[int, int] = (0, 0)
    """Number of schedulers since the last new token, and the number of tokens."""

    def outlasts(self, most: int) -> bool:
        """Count a new scheduler; return whether more than `most` came and went without a new token."""
        tokens = len(self.stream.tokens)
        self._terms = (self._terms[0] + 1 if tokens == self._terms[1] else 1, tokens)
        return self._terms[0] > most

    @property
    def fingerprint(self) -> bytes:
        """Digest of the tenant, model, adapter and prompt."""
        exchange = self.exchange
        about = f"{exchange.tenant.name}/{exchange.model}/{exchange.adapter}".encode()
        return blake2b(about + self.prompt, digest_size=16).digest()

    def spec(self, gateway_id: str, gateway_incarnation: int, now_s: float) -> SequenceSpec:
        exchange = self.exchange
        return SequenceSpec(
            ref=self.stream.ref,
            gateway_id=gateway_id,
            gateway_incarnation=gateway_incarnation,
            prompt=self.prompt,
            sampling=self.sampling,
            generated=pack_tokens(self.stream.tokens),
            waited_s=max(0.0, now_s - exchange.accepted_s),
            deadline_in_s=exchange.deadline.remaining_s(),
            cache_salt=exchange.cache_salt,
            model=exchange.model,
            adapter=exchange.adapter,
            priority=exchange.priority,
            tenant=exchange.tenant,
            open_tokens=self.stream.open_tokens(self.sampling.max_tokens),
            capability=self.stream.capability,
            heir_digest=exchange.heir_digest,
            is_resumed=exchange.is_resumed or self.stream.accepted,
            runs_alone=self.deaths >= ALONE_AFTER,
            is_bound=self.is_bound,
            traceparent=spans.current_traceparent(),
        )


@dataclass(slots=True, eq=False)
class Exchange:
    """The sequences of one request. `changed` is set on news of one, a disconnect or a failure."""

    sequences: list[OpenChoice] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    deadline: Deadline = NONE
    accepted_s: float = 0.0
    figures: ModelFigures = field(default_factory=ModelFigures)
    cache_salt: bytes = b""
    model: str = ""
    adapter: str = ""
    priority: int = 0
    tenant: Tenant = NOBODY
    heir_digest: bytes = b""
    """Digest of the key for a takeover; empty: no takeover."""
    is_resumed: bool = False
    """Another gateway began it."""
    context: Context = field(default_factory=copy_context)
    """The request's context, so that its trace follows every submission."""
    failure: Exception | None = None
    on_news: Callable[[], bool] | None = None
    """Called on news of a sequence; returns True when no task needs to be woken."""

    def notify(self) -> None:
        """Signal news of a sequence. Never raises: an error in `on_news` fails only this request."""
        try:
            if self.on_news is not None and self.on_news():
                return
        except Exception as error:
            _logger.exception("an answer could not be written")
            self.failure = InternalError(f"{type(error).__name__}: {error}")
        self.changed.set()

    def fail(self, error: Exception) -> None:
        """End the request with this error; ClientGone: the client has disconnected."""
        self.failure = error
        self.changed.set()

    async def wait(self) -> None:
        """Wait for a change since the last wait. Raises as `check` does. Always returns: a stream without a
        worker fails by itself."""
        await self.changed.wait()
        self.changed.clear()
        self.check()

    def check(self) -> None:
        """Raise ClientGone, the request's failure (such as DeadlineExceeded), or a sequence's failure."""
        if self.failure is not None:
            raise self.failure
        for sequence in self.sequences:
            if sequence.stream.phase is StreamPhase.FAILED:
                raise sequence.stream.failure or InternalError("a sequence failed without saying why")


async def admitted(exchange: Exchange, timeout_s: float) -> None:
    """Wait until the scheduler has accepted every sequence, before anything is sent to the client. Raises a
    sequence's refusal, ClientGone, or NoResponder at the timeout."""
    try:
        async with asyncio.timeout(timeout_s):
            for sequence in exchange.sequences:
                while not sequence.stream.accepted:
                    await exchange.wait()
    except TimeoutError:
        left = [sequence for sequence in exchange.sequences if not sequence.stream.accepted]
        text = f"no scheduler took {len(left)} of {len(exchange.sequences)} sequences within {timeout_s:g} s"
        raise NoResponder(text, retry_after_s=2.0) from None
    exchange.check()


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
        shards: ShardViews,
    ) -> None:
        self._config = config
        self._bus = bus
        self._tasks = tasks
        self._now_s = now_s
        self._counters = counters
        self._apply, self._shards = apply, shards
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
                reply: SubmitReply | None = None
                try:
                    spec = sequence.spec(self._bus.instance, self._bus.incarnation, self._now_s())
                    command, deadline_s = SubmitSequence(spec=spec), self._config.submit_deadline_s
                    self.note("submit", stream.ref, causes=dict(stream.handovers), tokens=len(stream.tokens))
                    shard = self._shard_of(sequence)
                    subject = subjects.submit_to(shard, self._bus.instance)
                    taken = await self._bus.request(subject, command, SubmitReply, deadline_s=deadline_s)
                    reply = self._checked(taken, shard)
                except Exception as error:
                    known = _known(error)
                    self._counters.submits.labels(known.code).inc()
                    self.note("refused", stream.ref, error=known.code)
                    is_unserved = isinstance(known, NoResponder) and stream.attempt == effect.attempt
                    effects = self._on_unserved(sequence) if is_unserved else ()
                    effects = effects or stream.on_submit_failed(effect.serial, known, self._now_s())
                else:
                    self._counters.submits.labels("taken").inc()
                    self.note("taken", stream.ref)
                    effects = stream.on_submitted(effect.serial, self._now_s())
            self._apply(sequence, effects)
            if reply is not None and reply.shard is not None:
                self.hand_over(sequence, SequenceHandedOver(ref=command.spec.ref, shard=reply.shard))

    def _checked(self, reply: SubmitReply, shard: int) -> SubmitReply:
        """Raises NotLeader if the scheduler that replied has a successor."""
        views = self._shards.views
        if shard < len(views) and reply.epoch < views[shard].said.epoch:
            raise NotLeader(f"{reply.scheduler_id} took the request, and another scheduler leads now")
        return reply

    def _shard_of(self, sequence: OpenChoice) -> int:
        """Return the shard to submit to, now chosen if it was not."""
        if sequence.shard is None:
            limit_tokens = len(sequence.prompt) // TOKEN_BYTES + sequence.sampling.max_tokens
            sequence.shard = self._shards.pick(sequence.exchange.model, limit_tokens, self._now_s())
        return sequence.shard

    def hand_over(self, sequence: OpenChoice, event: SequenceHandedOver) -> None:
        """Submit the next attempt to the shard that should have the sequence."""
        views, ref = self._shards.views, event.ref
        if max(event.shard, event.from_shard) >= len(views) or ref.attempt != sequence.stream.attempt:
            return
        is_stale = 0 < event.epoch < views[event.from_shard].said.epoch
        if not is_stale:
            sequence.shard, sequence.is_bound = event.shard, True
            self._apply(sequence, sequence.stream.on_prepared(ref, self._now_s(), cause="shard"))

    def _on_unserved(self, sequence: OpenChoice) -> StreamEffects:
        """Give a sequence that no scheduler has accepted to a present shard."""
        views, stream, now_s = self._shards.views, sequence.stream, self._now_s()
        if len(views) == 1 or sequence.shard is None or sequence.shard >= len(views):
            return ()
        views[sequence.shard].leave()
        if stream.accepted or not self._shards.is_present(now_s):
            return ()
        sequence.shard = None
        return (Cancel(stream.ref, None), *stream.on_prepared(stream.ref, now_s, cause="shard"))

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
