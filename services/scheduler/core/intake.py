"""Requests of gateways: submissions, cancels and heartbeats. Pure.

Submissions are idempotent: an attempt that is known, finished or cancelled is ignored; a higher one replaces
it. A key belongs to the first gateway that used it.
"""

from dataclasses import dataclass
from math import ceil

from services.scheduler.core.effects import AskPrediction, Effect, NoteForeign
from services.scheduler.core.roster import Roster
from services.scheduler.core.sequence import HELD, Phase, Sequence
from shared.errors import (
    ContextOverflow,
    ForeignSequence,
    InvalidRequest,
    MessageTooLarge,
    Overloaded,
    RoleMissing,
    UnavailableError,
    UnknownModel,
)
from shared.liveness import SILENCE_S, Liveness
from shared.messages.commands import CancelSequence
from shared.messages.reports import GatewayReported
from shared.messages.sequence import FinishReason, SequenceSpec

_LONGEST_RETRY_S = 600.0


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to an accepted submission: whether it was known, and its worker."""

    known: bool
    worker_id: str | None = None
    shard: int | None = None
    """Shard to which the attempt was handed over."""


class Intake:
    """Adds sequences to the roster and removes those without a reader."""

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self._rules = roster.rules
        self._gateways = Liveness(roster.rules.gateway_timeout_s)

    def on_submit(self, spec: SequenceSpec, now_s: float) -> tuple[Admission, list[Effect]]:
        """Add a sequence. Raises ContextOverflow, InvalidRequest, MessageTooLarge, Overloaded, RoleMissing,
        UnknownModel for an adapter that workers lack, ForeignSequence for another gateway's key,
        UnavailableError for a replaced gateway, or the error with which it was given up."""
        if self.roster.is_foreign(spec.ref.key, spec.gateway_id, now_s):
            raise ForeignSequence(
                f"{spec.ref} is another gateway's than {spec.gateway_id}'s: submit yours under another name"
            )
        effects = self._hear(spec.gateway_id, spec.gateway_incarnation, now_s)
        known = self.roster.sequences.get(spec.ref.key)
        if known is not None and known.ref.attempt >= spec.ref.attempt:
            if known.spec is None and known.ref == spec.ref:  # an adopted one
                known.note_spec(spec)
                effects.append(_question(known, spec))
            return Admission(known=True, worker_id=known.worker_id), effects
        ended = self.roster.ended.get(spec.ref.key, now_s)
        is_cancelled = self.roster.tombstones.covers(spec.gateway_id, spec.ref, now_s)
        if is_cancelled or (ended is not None and spec.ref.attempt <= ended[0]):
            return Admission(known=True), effects
        handed = self.roster.handed.get((spec.gateway_id, spec.ref.key), now_s)
        if handed is not None and spec.ref.attempt <= handed[0]:
            return Admission(known=True, shard=handed[1]), effects
        sequence = Sequence.from_spec(spec, now_s)
        self._check(spec, sequence, now_s)
        if known is not None:
            effects.append(self.roster.leave(known, Phase.REPLACED, now_s, lingers=spec.open_tokens > 0))
        self.roster.add(sequence)
        return Admission(known=False), [*effects, _question(sequence, spec)]

    def _check(self, spec: SequenceSpec, sequence: Sequence, now_s: float) -> None:
        is_resumed = spec.is_resumed or spec.ref.attempt > 1 or bool(spec.generated)
        if not is_resumed:  # an accepted sequence waits for workers to grow again: `long_waits`
            limit = self.roster.summary()[0]
            if limit is not None and sequence.limit_tokens > limit:
                raise beyond(limit, sequence)
        given_up = self.roster.dropped.get((spec.gateway_id, spec.ref.key), now_s)
        if given_up is not None:
            attempt, error = given_up
            if spec.ref.attempt <= attempt or isinstance(error, ContextOverflow):
                raise error.with_traceback(None)
        if not spec.prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        heard = self.roster.reports() if spec.adapter else ()
        if heard and not any(spec.adapter in report.adapters for report in heard):
            raise UnknownModel(f"no worker of {spec.model!r} has adapter {spec.adapter!r}", param="model")
        if spec.generated_tokens >= spec.sampling.max_tokens:
            raise InvalidRequest(
                f"max_tokens is {spec.sampling.max_tokens} and {spec.generated_tokens} tokens are there",
                param="max_tokens",
            )
        if len(spec.prompt) + len(spec.generated) > self._rules.max_start_bytes:
            raise MessageTooLarge(
                f"{len(spec.prompt) + len(spec.generated)} bytes of token ids are more than the"
                f" {self._rules.max_start_bytes} that one start may have",
                param="prompt",
            )
        if not is_resumed and (shortage := self.roster.shortage(now_s)):
            raise RoleMissing(shortage, retry_after_s=1.0)
        if self.roster.is_full(spec.tenant, resumed=is_resumed):
            raise Overloaded(f"{self._rules.max_queued} sequences wait already", retry_after_s=1.0)
        most_s = self._rules.refuse_wait_s
        if is_resumed or not most_s or spec.ref.choice:  # the first choice's wait decides for the request
            return
        wait_s = self.roster.backlog.queue.wait_s(sequence.task(), sequence.tenant)
        if wait_s is not None and wait_s > most_s:
            raise Overloaded(
                f"all workers are busy: this request would wait {wait_s:.0f} s, longer than the limit of"
                f" {most_s:g} s; send it again in {ceil(wait_s)} s",
                retry_after_s=min(wait_s, _LONGEST_RETRY_S),
            )

    def on_cancel(self, command: CancelSequence, now_s: float) -> list[Effect]:
        """Cancel this attempt and all lower ones; remember it for a submission that arrives later."""
        if self.roster.is_foreign(command.ref.key, command.sender, now_s):
            return [NoteForeign(command.sender, command.ref)]
        known = self.roster.sequences.get(command.ref.key)
        effects: list[Effect] = []
        if known is not None and known.ref.attempt <= command.ref.attempt:
            effects = self.roster.cancel(known, command.reason, now_s)
        self.roster.tombstones.put(command.sender, command.ref, now_s)
        return effects

    def on_gateway_reported(self, event: GatewayReported, now_s: float) -> list[Effect]:
        return self._hear(event.gateway_id, event.incarnation, now_s)

    def on_tick(self, now_s: float) -> list[Effect]:
        """Drop waiting sequences of silent gateways, without a tombstone: a frozen one can submit again."""
        return [
            self._forget(sequence, now_s)
            for gateway_id in self._gateways.silent(now_s)
            for sequence in list(self.roster.sequences.values())
            if sequence.gateway_id == gateway_id and sequence.phase not in HELD
        ]

    def watch(self, gateway_id: str, now_s: float) -> None:
        """Expect heartbeats of a gateway whose sequences were adopted."""
        if gateway_id not in self._gateways:
            self._gateways.expect(gateway_id, None, now_s)

    def _hear(self, gateway_id: str, incarnation: int, now_s: float) -> list[Effect]:
        known = self._gateways.present(gateway_id)
        if not self._gateways.hear(gateway_id, incarnation, now_s):
            raise UnavailableError(
                f"another start of {gateway_id} has replaced this one", retry_after_s=SILENCE_S
            )
        if known in (None, incarnation):
            return []
        return self._end_all_but(gateway_id, incarnation, now_s)

    def _end_all_but(self, gateway_id: str, incarnation: int, now_s: float) -> list[Effect]:
        """End sequences of earlier incarnations, which have no reader; workers end those with an heir."""
        effects: list[Effect] = []
        for sequence in list(self.roster.sequences.values()):
            if sequence.gateway_id != gateway_id or sequence.gateway_incarnation in (0, incarnation):
                continue
            if sequence.phase not in HELD:
                effects.append(self._forget(sequence, now_s))
            elif sequence.spec is None or not sequence.spec.heir_digest:
                effects += self.roster.cancel(sequence, FinishReason.GATEWAY_LOST, now_s)
        return effects

    def _forget(self, sequence: Sequence, now_s: float) -> Effect:
        return self.roster.leave(sequence, Phase.CANCELLED, now_s, FinishReason.GATEWAY_LOST)


def _question(sequence: Sequence, spec: SequenceSpec) -> AskPrediction:
    return AskPrediction(
        sequence.ref, spec.prompt, sequence.max_tokens, sequence.generated_tokens, spec.model
    )


def beyond(limit_tokens: int, sequence: Sequence) -> ContextOverflow:
    """Return the error for a sequence longer than any worker can hold."""
    return ContextOverflow(
        f"This model's maximum context length is {limit_tokens} tokens. However, you requested"
        f" {sequence.limit_tokens} tokens ({sequence.prompt_tokens} in the messages, {sequence.max_tokens} in"
        " the completion). Please reduce the length of the messages or completion.",
        param="messages",
    )
