"""A scheduler and workers small enough to be told what to do, on the real bus with the real protocol.

The scheduler hands each sequence to the next worker; a worker sends the tokens of `true_tokens`, one per
step, and keeps ended sequences until they are acknowledged. Switches make frames vanish, workers fall silent,
and so on.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from shared import subjects
from shared.bus import Bus, Endpoint, Listener
from shared.errors import KvasirError, UnavailableError
from shared.messages.commands import CancelSequence, SubmitReply, SubmitSequence
from shared.messages.prefixes import ForgetPrefixes, PrefixesForgotten
from shared.messages.reports import (
    GatewayReported,
    SchedulerAnnounced,
    SequenceFinished,
    SequenceReport,
    SequenceState,
    WorkerLost,
)
from shared.messages.sequence import (
    FinishReason,
    SequenceKey,
    SequenceRef,
    SequenceSpec,
    proof_of,
    unpack_tokens,
)
from shared.messages.tokens import (
    AcknowledgeEnds,
    FetchedTokens,
    FetchTokens,
    TokenDelta,
    TokenFrame,
    TokenLogprobs,
)
from tests.shared.messages.builders import sequence_report, worker_report

HEARTBEAT_S = 0.05
MODEL = "fake-chat"

TrueTokens = Callable[[SequenceSpec], list[int]]
"""The whole answer to a prompt, its end token included; the same however often it is resumed."""


def true_logprobs(index: int, token: int, top: int) -> TokenLogprobs:
    """Made up, but always the same: the chosen token likeliest, and the last of the others impossible."""
    others = [(other, -1.0 - index / 1000 - at) for at, other in enumerate(range(token + 1, token + top))]
    if others:
        others[-1] = (others[-1][0], -math.inf)
    chosen = -index / 1000
    return TokenLogprobs(chosen, ((token, chosen), *others) if top else ())


@dataclass
class Held:
    """A sequence at a worker."""

    spec: SequenceSpec
    tokens: list[int]
    proof: bytes = b""
    finish_reason: FinishReason | None = None

    def delta(self, first_index: int) -> TokenDelta:
        """What it has from `first_index` on."""
        ref, top = self.spec.ref, self.spec.sampling.top_logprobs
        tokens = tuple(self.tokens[first_index:])
        is_own = first_index >= self.spec.generated_tokens
        logprobs: tuple[TokenLogprobs, ...] = ()
        if top is not None and is_own:
            logprobs = tuple(true_logprobs(at, token, top) for at, token in enumerate(tokens, first_index))
        ended = self.finish_reason
        return TokenDelta(*ref.key, ref.attempt, first_index, tokens, ended, 3, logprobs, self.proof)


class FakeWorker:
    """Runs what it is given, one token per `step_s` for every sequence at once."""

    HANDLERS = (
        Endpoint(subjects.worker_fetch.to, FetchTokens, "fetch", sender="sender"),
        Listener(subjects.worker_cancel.to, CancelSequence, "on_cancel", sender="sender"),
        Listener(subjects.worker_acknowledge.to, AcknowledgeEnds, "on_acknowledge", sender="sender"),
        Endpoint(subjects.worker_forget.to, ForgetPrefixes, "forget", sender="sender"),
    )

    def __init__(self, bus: Bus, true_tokens: TrueTokens) -> None:
        self.bus, self.true_tokens = bus, true_tokens
        self.step_s = 0.002
        self.held: dict[SequenceKey, Held] = {}
        self.cancelled: list[SequenceRef] = []
        self.acknowledged: list[SequenceRef] = []
        self.frozen = False
        """As after SIGSTOP: nothing is sent or heard."""
        self.computing = asyncio.Event()
        self.computing.set()
        self.edit: Callable[[TokenDelta], list[TokenDelta]] = lambda delta: [delta]
        """What becomes of a delta on its way: dropped, doubled, changed."""
        self._seq = 0

    async def start(self) -> list[asyncio.Task[None]]:
        """Its loops, to be cancelled at the end."""
        await self.bus.attach(self.HANDLERS, self)
        return [asyncio.create_task(self._beat()), asyncio.create_task(self._run())]

    def take(self, spec: SequenceSpec) -> None:
        proof = proof_of(spec.capability, self.bus.instance, self.bus.incarnation)
        self.held[spec.ref.key] = Held(spec, unpack_tokens(spec.generated), proof)

    async def fetch(self, question: FetchTokens) -> FetchedTokens:
        held = self.held.get(question.ref.key)
        if held is None or held.spec.ref != question.ref:
            return FetchedTokens()
        return FetchedTokens(delta=held.delta(question.first_index))

    async def forget(self, _: ForgetPrefixes) -> PrefixesForgotten:
        if self.frozen:
            raise UnavailableError("busy")
        return PrefixesForgotten(blocks=7)

    def on_cancel(self, command: CancelSequence) -> None:
        if self.frozen:
            return
        self.cancelled.append(command.ref)
        held = self.held.get(command.ref.key)
        if held is not None and held.spec.ref.attempt <= command.ref.attempt:
            del self.held[command.ref.key]

    def on_acknowledge(self, command: AcknowledgeEnds) -> None:
        for ref in command.refs:
            self.acknowledged.append(ref)
            held = self.held.get(ref.key)
            if held is not None and held.spec.ref == ref:
                del self.held[ref.key]

    async def report(self) -> None:
        self._seq += 1
        me, listed = self.bus, tuple(self._listed(held) for held in self.held.values())
        numbers = {"incarnation": me.incarnation, "seq": self._seq, "max_context_tokens": 512}
        report = worker_report(me.instance, model=MODEL, sequences=listed, **numbers)
        await me.publish(subjects.worker_reported(me.instance), report)

    def _listed(self, held: Held) -> SequenceReport:
        return sequence_report(
            held.spec.ref,
            SequenceState.ENDED if held.finish_reason else SequenceState.DECODING,
            gateway_id=held.spec.gateway_id,
            prompt_tokens=held.spec.prompt_tokens,
            generated_tokens=len(held.tokens),
            max_tokens=held.spec.sampling.max_tokens,
            finish_reason=held.finish_reason,
            proof=held.proof,
        )

    async def _beat(self) -> None:
        while True:
            if not self.frozen:
                await self.report()
            await asyncio.sleep(HEARTBEAT_S)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            await self.computing.wait()
            if not self.frozen:
                for held in list(self.held.values()):
                    if held.finish_reason is None:
                        await self.step(held)

    async def step(self, held: Held) -> None:
        """One token of one sequence."""
        spec, at = held.spec, len(held.tokens)
        answer = self.true_tokens(spec)
        held.tokens.append(answer[at])
        if answer[at] in spec.sampling.end_token_ids:
            held.finish_reason = FinishReason.STOP
        elif len(held.tokens) == spec.sampling.max_tokens:
            held.finish_reason = FinishReason.LENGTH
        await self.send(held.delta(at), spec.gateway_id)

    async def send(self, delta: TokenDelta, gateway_id: str) -> None:
        if deltas := tuple(self.edit(delta)):
            frame = TokenFrame(self.bus.instance, self.bus.incarnation, deltas)
            await self.bus.publish(subjects.tokens(gateway_id, self.bus.instance), frame)


@dataclass(eq=False)
class FakeScheduler:
    """Hands sequences to `workers` in turn; `refusal` is raised instead."""

    HANDLERS = (
        Endpoint(subjects.ANY_SCHEDULER_SUBMIT, SubmitSequence, "submit"),
        Listener(subjects.ANY_SCHEDULER_CANCEL, CancelSequence, "on_cancel", sender="sender"),
        Listener(subjects.GATEWAY_FINISHED, SequenceFinished, "on_finished"),
        Listener(subjects.ANY_GATEWAY_REPORTED, GatewayReported, "on_gateway"),
    )

    bus: Bus
    workers: list[FakeWorker]
    refusal: KvasirError | None = None
    epoch: int = 1
    submits: list[SequenceSpec] = field(default_factory=list)
    cancelled: list[SequenceRef] = field(default_factory=list)
    finished: list[SequenceFinished] = field(default_factory=list)
    gateways: list[GatewayReported] = field(default_factory=list)
    known: dict[SequenceKey, int] = field(default_factory=dict)

    async def start(self) -> list[asyncio.Task[None]]:
        """Its loop, to be cancelled at the end."""
        await self.bus.attach(self.HANDLERS, self)
        return [asyncio.create_task(self._announce())]

    async def submit(self, command: SubmitSequence) -> SubmitReply:
        spec = command.spec
        self.submits.append(spec)
        if self.refusal is not None:
            raise self.refusal
        known = self.known.get(spec.ref.key, 0) >= spec.ref.attempt
        if not known:
            self.known[spec.ref.key] = spec.ref.attempt
            alive = [worker for worker in self.workers if not worker.frozen]
            if alive:
                alive[len(self.submits) % len(alive)].take(spec)
        return SubmitReply(
            scheduler_id=self.bus.instance, incarnation=self.bus.incarnation, epoch=self.epoch, known=known
        )

    def on_cancel(self, command: CancelSequence) -> None:
        self.cancelled.append(command.ref)

    def on_finished(self, event: SequenceFinished) -> None:
        self.finished.append(event)

    def on_gateway(self, event: GatewayReported) -> None:
        self.gateways.append(event)

    async def lose(self, worker: FakeWorker) -> None:
        """Say that a worker is gone, with everything it held."""
        refs = tuple(held.spec.ref for held in worker.held.values())
        event = WorkerLost(worker_id=worker.bus.instance, incarnation=worker.bus.incarnation, refs=refs)
        await self.bus.publish(subjects.SCHEDULER_WORKER_LOST, event)

    async def _announce(self) -> None:
        me = self.bus.instance
        while True:
            event = SchedulerAnnounced(
                scheduler_id=me, incarnation=self.bus.incarnation, epoch=self.epoch, policy="fake"
            )
            await self.bus.publish(subjects.SCHEDULER_ANNOUNCED, event)
            await asyncio.sleep(HEARTBEAT_S)


async def cancelled(task: asyncio.Task[None]) -> None:
    """Cancel and wait."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
