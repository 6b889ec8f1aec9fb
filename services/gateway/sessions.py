"""The sequences that this gateway has accepted and not finished. The HTTP side opens and closes exchanges
here; the bus side delivers events. `dispatch` carries out the effects."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from secrets import token_bytes

from services.gateway.config import GatewayConfig
from services.gateway.core.stream import Stream, StreamEffects, StreamPhase, StreamTiming, disown
from services.gateway.core.views import ShardViews, StackView, WorkerTable
from services.gateway.counters import Counters
from services.gateway.errors import ShuttingDown
from services.gateway.exchange import (
    NO_LEGACY,
    NONE,
    REFUSED_AFTER,
    SILENT_DEATH,
    Deadline,
    Dispatch,
    Exchange,
    Legacy,
    OpenChoice,
)
from services.gateway.openai.admission import AdmittedRequest
from services.gateway.text.choice_text import NOT_GIVEN, ChoiceText
from services.gateway.text.tokenizer import Codec
from shared import log, subjects
from shared.bus import Bus
from shared.clock import Clock
from shared.errors import NoResponder, Overloaded, UnavailableError, WorkerKilled
from shared.liveness import Start
from shared.messages.moves import MovePrepared
from shared.messages.reports import (
    MOST_REFUSED,
    GatewayReported,
    SchedulerAnnounced,
    SequenceFinished,
    SequenceHandedOver,
    SequencesGivenUp,
    StackVerdict,
    WorkerLost,
    WorkerReported,
)
from shared.messages.sequence import (
    NOBODY,
    FinishReason,
    SequenceKey,
    Tenant,
    heir_digest_of,
    is_beyond_share,
    pack_tokens,
    unpack_tokens,
)
from shared.messages.tokens import TokenFrame
from shared.release import PROTOCOL
from shared.shards import shard_of
from shared.ttl_map import RecentMap

_REFUSED_S = 600.0
_MOST_TERMS = 8
"""Number of schedulers that a request without a new token outlasts."""
_logger = log.get_logger("gateway.sessions")


class Sessions:
    """Registry of this process's open sequences."""

    def __init__(self, config: GatewayConfig, bus: Bus, tasks: asyncio.TaskGroup, now_s: Clock) -> None:
        self._config = config
        self._bus = bus
        self.now_s = now_s
        self._open: dict[SequenceKey, OpenChoice] = {}
        self._news: dict[Exchange, None] = {}
        """Exchanges with news that their readers have not seen."""
        self._worker_seen = asyncio.Event()
        self._is_draining = self._is_ended = False
        self.prompt_tokens = self.output_tokens = 0
        self._secret = token_bytes(32)
        self._timing = StreamTiming(frame_timeout_s=config.frame_timeout_s, give_up_s=config.give_up_s)
        names = (config.served_name, *config.models)
        self.counters = Counters(names)
        self.workers = WorkerTable(names, config.worker_timeout_s)
        self.stack = StackView()
        self.scheduler = ShardViews(config.scheduler_timeout_s)
        self._refused: RecentMap[bytes, bool] = RecentMap(_REFUSED_S, MOST_REFUSED)
        """Fingerprints of requests that killed workers."""
        self.dispatch = Dispatch(config, bus, tasks, now_s, self.counters, self.apply, self.scheduler)

    @property
    def active(self) -> int:
        return len(self._open)

    def latest(self, count: int) -> list[OpenChoice]:
        """Return the `count` newest sequences in progress, newest first."""
        return list(islice(reversed(self._open.values()), count))

    # --- for the HTTP side

    async def context_tokens(self, timeout_s: float, model: str) -> int:
        """Return the context length in tokens. Raises NoResponder when no worker appears in time."""
        if (limit := self.workers.context_tokens(model)) is not None:
            return limit
        try:
            async with asyncio.timeout(timeout_s):
                while (limit := self.workers.context_tokens(model)) is None:
                    self._worker_seen.clear()
                    await self._worker_seen.wait()
        except TimeoutError:
            raise NoResponder(self.workers.absence(model), retry_after_s=2.0) from None
        return limit

    def unready_reasons(self) -> list[str]:
        """Return why requests cannot be answered yet; empty when ready."""
        checks = {
            "the server is shutting down": not self._is_draining,
            "not connected to the bus": self._bus.connected,
            "no scheduler has announced itself": self.scheduler.is_present(self.now_s()),
        }
        absence = [] if self.workers.serving else [self.workers.absence(self._config.served_name)]
        return [*(reason for reason, holds in checks.items() if not holds), *absence]

    def open(
        self,
        job: AdmittedRequest,
        request_id: str,
        deadline: Deadline = NONE,
        salt: bytes = b"",
        model: str = "",
        tenant: Tenant = NOBODY,
        legacy: Legacy = NO_LEGACY,
        adapter: str = "",
    ) -> Exchange:
        """Submit the job's sequences to workers of `model`, for its `adapter` if set; `legacy` holds tokens
        from a former gateway. Requests with the same `salt` share cached prefixes. Raises Overloaded at the
        sequence limit, and ShuttingDown."""
        if self._is_ended:
            raise ShuttingDown
        more = len(job.prompts) * job.n - self._config.max_active_sequences
        if len(self._open) + more > 0 and self._is_beyond_share(1 - more, tenant):
            raise Overloaded(f"{len(self._open)} sequences are in progress already", retry_after_s=1.0)
        now_s, so_far = self.now_s(), iter(legacy.so_far)
        exchange = Exchange(
            deadline=deadline,
            accepted_s=now_s - legacy.waited_s,
            figures=self.counters.models[model or self._config.served_name],
            cache_salt=salt,
            model=model,
            adapter=adapter,
            priority=job.priority,
            tenant=tenant,
            heir_digest=heir_digest_of(legacy.heir_key),
            is_resumed=legacy.is_resumed,
        )
        for at, (prompt, sampling) in enumerate(zip(job.prompts, job.samplings, strict=True)):
            packed = pack_tokens(prompt)
            self.prompt_tokens += len(prompt)
            sequence_id = request_id if at == 0 else f"{request_id}-{at}"
            for choice in range(job.n):
                stream = Stream((sequence_id, choice), self._timing, now_s, self._secret)
                if (known := next(so_far, None)) is not None:
                    stream.take_over(unpack_tokens(known.tokens), known.finish_reason, known.cached_tokens)
                exchange.sequences.append(OpenChoice(stream, packed, sampling, exchange))
        if self._refused.items() and any(one.fingerprint in self.refused for one in exchange.sequences):
            raise _killer(f"is refused for {_REFUSED_S / 60:.0f} minutes")
        for sequence in exchange.sequences:
            self._open[sequence.stream.key] = sequence
            self.apply(sequence, sequence.stream.submit(now_s))
        return exchange

    @property
    def refused(self) -> dict[bytes, bool]:
        """Fingerprints of requests that killed workers lately, and whether this gateway saw it."""
        self._refused.expire(self.now_s())
        return dict(self._refused.items())

    def refuse(self, fingerprints: Iterable[bytes], *, is_own: bool = False) -> None:
        """Refuse requests that killed workers, as this gateway or another has seen."""
        for name in fingerprints:
            if self._refused.get(name, self.now_s()) is None:
                self._refused.put(name, is_own, self.now_s())

    def _is_beyond_share(self, limit: int, tenant: Tenant) -> bool:
        """Whether the tenant has its share of the sequences in progress."""
        counts = Counter(sequence.exchange.tenant.name for sequence in self._open.values())
        return is_beyond_share(counts, tenant.name, limit)

    def answers(self, exchange: Exchange, job: AdmittedRequest, codec: Codec) -> list[ChoiceText]:
        """Return one text reader per sequence, in order; `codec` is the model's."""
        answers = []
        for index, sequence in enumerate(exchange.sequences):
            ends = codec.end_token_ids if job.rules.includes_stop else sequence.sampling.end_token_ids
            given = job.given[index // job.n] if job.given else NOT_GIVEN
            answers.append(ChoiceText(index, sequence.stream, codec.tokenizer, ends, job.rules, given))
        return answers

    def finish(self, sequence: OpenChoice, output_tokens: int) -> None:
        """End a sequence whose stop string is complete; cancel it if it still runs."""
        if sequence.stream.is_open:
            sequence.stopped_tokens = output_tokens
            self.apply(sequence, sequence.stream.cancel())

    def close(self, exchange: Exchange) -> None:
        for sequence in exchange.sequences:
            self.apply(sequence, sequence.stream.cancel())

    def note_blocked(self, request_id: str, for_s: float) -> None:
        """Record that a write has waited `for_s` seconds for the client."""
        self._bus.recorder.note("reader slow", request_id, for_s=for_s)

    def beat(self) -> None:
        me = self._bus
        event = GatewayReported(
            gateway_id=me.instance,
            incarnation=me.incarnation,
            active=self.active,
            protocol=PROTOCOL,
            refused=tuple(name for name, is_own in self.refused.items() if is_own),
        )
        self.dispatch.outbox.put(subjects.gateway_reported(me.instance), event)
        self.dispatch.heartbeats += 1

    def drain(self) -> None:
        """Report not ready from now on; running requests continue."""
        self._is_draining = True

    def end(self) -> None:
        """Fail every running request with ShuttingDown and accept no more."""
        self._is_draining = self._is_ended = True
        left = {id(sequence.exchange): sequence.exchange for sequence in self._open.values()}
        if left:
            log.canonical(_logger, "answers ended by the shutdown", exchanges=len(left))
        for exchange in left.values():
            exchange.fail(ShuttingDown())

    # --- for the bus side

    def on_frame(self, frame: TokenFrame) -> None:
        """Deliver a frame's tokens to their sequences; workers send one frame per step."""
        now_s, worker = self.now_s(), (frame.worker_id, frame.incarnation)
        for delta in frame.deltas:
            sequence = self._open.get((delta.request_id, delta.choice))
            if sequence is None or not sequence.stream.reads(delta.attempt):
                self.counters.stale_deltas.inc()
                continue
            stream, exchange = sequence.stream, sequence.exchange
            self.output_tokens += len(delta.tokens)
            before = len(stream.tokens)
            if effects := stream.on_delta(delta, worker, now_s):
                self.apply(sequence, effects)
            new = len(stream.tokens) - before
            if not new:  # a frame may arrive twice
                continue
            self._wake(exchange)
            figures = exchange.figures
            figures.generated_tokens += new
            if sequence.heard_s:
                figures.gap_s.observe(now_s - sequence.heard_s)
            sequence.heard_s = now_s
            if not before:
                self.dispatch.note(
                    "first tokens", stream.ref, worker=worker[0], cached_tokens=delta.cached_tokens
                )

    def on_worker_reported(self, report: WorkerReported) -> None:
        """Update the worker's liveness, and check its listed sequences for gaps and orphans."""
        now_s, worker = self.now_s(), (report.worker_id, report.incarnation)
        ended_run = self.workers.on_report(report, now_s)
        self._worker_seen.set()
        if ended_run is not None:
            self.lose(ended_run, {})
        for listed in report.sequences:
            if listed.gateway_id != self._bus.instance:
                continue
            sequence = self._open.get(listed.ref.key)
            if sequence is not None:
                was_accepted = sequence.stream.accepted
                effects = sequence.stream.on_report(listed, worker, now_s)
                if effects or not was_accepted:
                    self.apply(sequence, effects)
            elif listed.heir_of in (0, self._bus.incarnation):  # not one that awaits a takeover
                self.dispatch.tell(disown(listed, worker, goes_on=False))

    def on_scheduler_announced(self, event: SchedulerAnnounced) -> None:
        """Resubmit the shard's open sequences, under their current attempts, to a new scheduler."""
        now_s, shards = self.now_s(), len(self.scheduler.views)
        new = self.scheduler.on_announced(event, now_s)
        if shards != (count := len(self.scheduler.views)):
            for sequence in self._open.values():
                server, sequence.is_bound = sequence.stream.server, False
                if server is not None:
                    sequence.shard = shard_of(server[0], count)
                elif sequence.shard is not None and sequence.shard >= count:
                    sequence.shard = None
        if event.shard in new:
            mine = [each for each in self._open.values() if each.shard in (None, event.shard)]
            found = {"scheduler": event.scheduler_id, "epoch": event.epoch, "resubmitted": len(mine)}
            log.canonical(_logger, "scheduler announced", **found)
            for sequence in mine:
                if sequence.outlasts(_MOST_TERMS):
                    sequence.exchange.fail(UnavailableError(f"{_MOST_TERMS} schedulers failed to serve this"))
                self.apply(sequence, sequence.stream.submit(now_s))

    def on_worker_lost(self, event: WorkerLost) -> None:
        """Hand over the sequences of a worker that the scheduler declared lost."""
        worker = (event.worker_id, event.incarnation)
        self.workers.on_lost(worker)
        self.lose(worker, {ref.key: ref.attempt for ref in event.refs}, is_dead=event.is_dead)

    def on_given_up(self, event: SequencesGivenUp) -> None:
        """Resubmit attempts that the scheduler gave up, so that it refuses them with a reason."""
        for ref in event.refs:
            sequence = self._open.get(ref.key)
            if sequence is not None and sequence.stream.attempt == ref.attempt:
                self.apply(sequence, sequence.stream.submit(self.now_s()))

    def on_handed_over(self, event: SequenceHandedOver) -> None:
        """Submit a sequence to the shard that should have it."""
        sequence = self._open.get(event.ref.key)
        if sequence is not None:
            self.dispatch.hand_over(sequence, event)

    def on_prepared(self, event: MovePrepared) -> None:
        """Hand a sequence over to a prepared worker. The event may concern another gateway."""
        sequence, now_s = self._open.get(event.ref.key), self.now_s()
        if sequence is not None:
            effects = sequence.stream.on_prepared(event.ref, now_s, event.target, event.open_tokens)
            self.apply(sequence, effects)

    def on_verdict(self, event: StackVerdict) -> None:
        self.stack.on_verdict(event, self.now_s())

    def lose(self, worker: Start, attempts: Mapping[SequenceKey, int], *, is_dead: bool = True) -> None:
        """Hand over the sequences of a worker's run; `attempts` lists those its scheduler had sent it.
        `is_dead`: see `WorkerLost`."""
        handed_over = 0
        for key, sequence in list(self._open.items()):
            effects = sequence.stream.on_worker_lost(worker, attempts.get(key), self.now_s())
            handed_over += bool(effects)
            sequence.deaths += bool(effects) * (1.0 if is_dead else SILENT_DEATH)
            if effects and sequence.deaths >= REFUSED_AFTER:
                self.counters.killers.inc()
                self.refuse([sequence.fingerprint], is_own=True)
                log.canonical(_logger, "request kills workers", request_id=key[0], last=worker[0])
                sequence.exchange.fail(_killer("failed"))
                effects = sequence.stream.cancel()
            self.apply(sequence, effects)
        found = {"worker": worker[0], "incarnation": worker[1], "handed_over": handed_over}
        log.canonical(_logger, "worker gone", **found)

    def on_absence(self) -> None:
        """Hand over unserved sequences after this process was stopped or off the bus for too long."""
        for sequence in list(self._open.values()):
            self.apply(sequence, sequence.stream.on_silence(self.now_s()))

    def on_tick(self) -> None:
        """Advance every timeout. Call about ten times a second."""
        now_s = self.now_s()
        for worker in self.workers.on_tick(now_s):
            self.lose(worker, {}, is_dead=False)
        for sequence in list(self._open.values()):
            if effects := sequence.stream.on_tick(now_s):
                self.apply(sequence, effects)
        self.counters.active.set(len(self._open))
        self.counters.workers.set(self.workers.serving)

    def apply(self, sequence: OpenChoice, effects: StreamEffects) -> None:
        """Carry out the effects, retire a finished sequence, and wake the reader."""
        for effect in effects:
            self.dispatch.carry_out(sequence, effect)
        if not sequence.stream.is_open and self._open.pop(sequence.stream.key, None) is not None:
            self._retire(sequence)
        self._wake(sequence.exchange)

    def _wake(self, exchange: Exchange) -> None:
        """Wake the exchange's reader once the event loop has handled what has arrived: a reader sees the
        tokens of several frames at once, and writes them as one event."""
        if not self._news:
            asyncio.get_running_loop().call_soon(self._wake_readers)
        self._news[exchange] = None

    def _wake_readers(self) -> None:
        news, self._news = self._news, {}
        for exchange in news:
            exchange.notify()

    def _retire(self, sequence: OpenChoice) -> None:
        stream = sequence.stream
        reason = None if stream.finish_reason is None else str(stream.finish_reason)
        found = {"phase": str(stream.phase), "reason": reason, "tokens": len(stream.tokens)}
        self.dispatch.note("tokens complete", stream.ref, **found)
        for cause, count in stream.handovers.items():
            self.counters.handovers.labels(cause).inc(count)
        tokens, ended = len(stream.tokens), FinishReason.CANCELLED
        if sequence.stopped_tokens is not None:
            tokens, ended = sequence.stopped_tokens, FinishReason.STOP
        elif stream.phase is StreamPhase.ENDED:
            ended = stream.finish_reason or ended
        event = SequenceFinished(
            ref=stream.ref,
            prompt=b"" if ended is FinishReason.CANCELLED else sequence.prompt,
            output_tokens=tokens,
            finish_reason=ended,
            max_tokens=sequence.sampling.max_tokens,
            model=sequence.exchange.model,
        )
        self.dispatch.outbox.put(subjects.GATEWAY_FINISHED, event)


def _killer(fate: str) -> WorkerKilled:
    return WorkerKilled(f"{REFUSED_AFTER} workers died while they ran this request, which therefore {fate}")
