"""The other gateways: liveness, exchanged shadows, and tokens that workers hold. Every request to others has
a timeout. None is needed for an answer: what cannot be fetched is computed again, with the same result."""

import asyncio
from collections.abc import Iterable, Sequence
from secrets import token_bytes

from msgspec.structs import replace

from services.gateway.config import GatewayConfig
from services.gateway.core.request_copies import RequestShadows
from services.gateway.core.stream import ANSWERS
from services.gateway.exchange import Exchange
from services.gateway.sessions import Sessions
from shared import log, subjects
from shared.bus import Bus
from shared.clock import Clock
from shared.errors import KvasirError
from shared.liveness import Liveness, Start
from shared.messages.base import Empty
from shared.messages.commands import CancelSequence
from shared.messages.reports import GatewayReported, WorkerReported
from shared.messages.sequence import SequenceKey, SequenceRef, pack_tokens
from shared.messages.shadows import AnswerSoFar, ClaimAnswer, ClaimedAnswer, Shadow, TellShadows
from shared.messages.tokens import FetchedTokens, FetchTokens

_logger = log.get_logger("gateway.peers")
_SILENCE_S = 6.0
"""Seconds of silence after which a gateway counts as gone. Workers wait longer."""
_TELL_S = 0.5
_COLLECT_S = 1.5
"""Seconds for workers to list their sequences; more than a heartbeat period."""
_LOOK_S = 0.05
_AT_ONCE = 64


def origin_of(request_id: str) -> str:
    """Return the id that the accepting gateway gave to the request."""
    return request_id.partition("~")[0]


class Peers:
    """This gateway's view of the other gateways."""

    def __init__(self, config: GatewayConfig, bus: Bus, sessions: Sessions, now_s: Clock) -> None:
        self._config = config
        self._bus = bus
        self.own_id = bus.instance
        self._sessions = sessions
        self._now_s = now_s
        self._alive = Liveness(_SILENCE_S)
        self.shadows = RequestShadows(config.resume_mb * 1024 * 1024, config.resume_s)
        self._at_once = asyncio.Semaphore(_AT_ONCE)

    # --- liveness

    def on_reported(self, event: GatewayReported) -> Start | None:
        """Process a heartbeat; return the run that it ends, if any. A new gateway gets one in return."""
        self._sessions.refuse(event.refused)
        known = self._alive.present(event.gateway_id)
        is_current = self._alive.hear(event.gateway_id, event.incarnation, self._now_s())
        if not is_current or known == event.incarnation:
            return None
        self._sessions.beat()
        return None if known is None else (event.gateway_id, known)

    def on_gone(self, start: Start) -> bool:
        """Note that a gateway has left the bus; return whether that is news."""
        if self._alive.present(start[0]) != start[1]:
            return False
        self._alive.forget(start[0])
        return True

    def silent(self) -> list[Start]:
        """Return the gateways that have become silent, each once."""
        starts = {name: self._alive.present(name) or 0 for name in self._alive}
        return [(name, starts[name]) for name in self._alive.silent(self._now_s())]

    def is_present(self, start: Start) -> bool:
        return self._alive.present(start[0]) == start[1]

    @property
    def heir(self) -> Start | None:
        """Gateway that would take over from this one: the next by name."""
        names = sorted(self._alive)
        if not names:
            return None
        name = next((name for name in names if name > self._bus.instance), names[0])
        return name, self._alive.present(name) or 0

    # --- shadows

    async def tell(
        self, heir: Start, *taken: Shadow, ended: Sequence[str] = (), dropped: Sequence[str] = ()
    ) -> bool:
        """Report new, ended and dropped shadows to the heir; return whether it confirmed."""
        bus = self._bus
        message = TellShadows(
            sender=bus.instance,
            incarnation=bus.incarnation,
            taken=taken,
            ended=tuple(ended),
            dropped=tuple(dropped),
        )
        try:
            subject = subjects.gateway_shadow(heir[0], bus.instance)
            await bus.request(subject, message, Empty, deadline_s=_TELL_S)
        except KvasirError as error:
            _logger.warning("%s keeps no shadow of %d answers: %s", heir[0], len(taken), error)
            return False
        return True

    def on_told(self, message: TellShadows) -> None:
        """Update the shadows from another gateway's report."""
        owner, now_s = (message.sender, message.incarnation), self._now_s()
        for shadow in message.taken:
            self.shadows.put(owner, shadow, now_s)
        for request_id in message.ended:
            self.shadows.end(owner, request_id, now_s)
        for request_id in message.dropped:
            self.shadows.drop(owner, request_id)

    def inherited(self, shadow: Shadow, told_s: float) -> Shadow:
        """Return the shadow as this gateway's own: new id and heir key, times as of now."""
        takeovers = shadow.takeovers + 1
        request_id = f"{origin_of(shadow.request_id)}~{takeovers}"
        shadow = self.as_of_now(shadow, told_s)
        return replace(shadow, request_id=request_id, heir_key=token_bytes(16), takeovers=takeovers)

    def resume(self, exchange: Exchange) -> None:
        """Continue under new attempts, after a takeover while this gateway was alive."""
        now_s = self._now_s()
        for sequence in exchange.sequences:
            self._sessions.apply(sequence, sequence.stream.on_silence(now_s, is_inherited=True))

    # --- answers at other gateways

    async def claim(self, name: bytes, *, only_asks: bool = False) -> tuple[ClaimedAnswer | None, bool]:
        """Return the named answer, moved here, and whether another gateway keeps it. That is so when its
        owner did not reply, or still produces it and `only_asks` is set."""
        names = list(self._alive)
        answers = await asyncio.gather(*(self._claim(peer, name, only_asks) for peer in names))
        of = {peer: answer for peer, answer in zip(names, answers, strict=True) if answer is not None}
        for answer in of.values():
            if answer.shadow is not None:
                return answer, False
        owners = {answer.owner for answer in of.values() if answer.owner}
        if (own := self.shadows.find(name)) is not None:
            if own.is_orphan or not self.is_present(own.owner):
                self.shadows.take(own.shadow.request_id)
                return ClaimedAnswer(shadow=self.as_of_now(own.shadow, own.told_s)), False
            owners.add(own.owner[0])
        return None, any((said := of.get(owner)) is None or said.owner == owner for owner in owners)

    async def _claim(self, peer: str, name: bytes, only_asks: bool) -> ClaimedAnswer | None:
        me = self._bus.instance
        try:
            return await self._bus.request(
                subjects.gateway_claim(peer, me),
                ClaimAnswer(sender=me, name=name, only_asks=only_asks),
                ClaimedAnswer,
                deadline_s=_TELL_S,
            )
        except KvasirError:
            return None

    def on_claim(self, name: bytes) -> ClaimedAnswer:
        """Reply about a shadow kept here: give it away if its owner is gone."""
        known = self.shadows.find(name)
        if known is None:
            return ClaimedAnswer()
        if not known.is_orphan and self.is_present(known.owner):
            return ClaimedAnswer(owner=known.owner[0])
        self.shadows.take(known.shadow.request_id)
        return ClaimedAnswer(shadow=self.as_of_now(known.shadow, known.told_s))

    def as_of_now(self, shadow: Shadow, told_s: float) -> Shadow:
        """Return the shadow of `told_s` with its times moved to now."""
        since_s, left_s = max(0.0, self._now_s() - told_s), shadow.deadline_in_s
        left_s = None if left_s is None else left_s - since_s
        return replace(shadow, waited_s=shadow.waited_s + since_s, deadline_in_s=left_s)

    # --- tokens at workers

    async def collect(self, shadows: Sequence[Shadow]) -> dict[str, tuple[AnswerSoFar, ...]]:
        """Return the tokens that workers hold of each request, and cancel them there. Skips answers with
        log-probabilities, since workers hold only some of these."""
        wanted = {
            key: shadow
            for shadow in shadows
            for key in shadow.keys
            if all(sampling.top_logprobs is None for sampling in shadow.samplings)
        }
        found: dict[SequenceKey, AnswerSoFar] = {}
        seen = {report.worker_id: report.seq for report in self._sessions.workers.reports()}
        until_s = self._now_s() + _COLLECT_S
        while wanted:
            reports = self._sessions.workers.reports()
            listed = _listed(reports, wanted)
            fetched = await asyncio.gather(
                *(self._fetch(worker, ref, wanted[ref.key]) for ref, worker in listed)
            )
            for (ref, _), answer in zip(listed, fetched, strict=True):
                if answer is not None:
                    found[ref.key] = answer
                    wanted.pop(ref.key, None)
            have_all_spoken = all(report.seq > seen.get(report.worker_id, 0) for report in reports)
            if (have_all_spoken and not listed) or self._now_s() >= until_s:
                break
            await asyncio.sleep(_LOOK_S)
        return {
            shadow.request_id: tuple(found.get(key, AnswerSoFar()) for key in shadow.keys)
            for shadow in shadows
        }

    async def _fetch(self, worker_id: str, ref: SequenceRef, shadow: Shadow) -> AnswerSoFar | None:
        me = self._bus.instance
        question = FetchTokens(ref=ref, sender=me, first_index=0, heir_key=shadow.heir_key)
        async with self._at_once:
            try:
                answer = await self._bus.request(
                    subjects.worker_fetch(worker_id, me), question, FetchedTokens, deadline_s=_TELL_S
                )
            except KvasirError as error:
                _logger.warning("%s does not say what it has of %s: %s", worker_id, ref, error)
                return None
        delta = answer.delta
        if delta is None:
            return None
        cancel = CancelSequence(ref=ref, sender=me, heir_key=shadow.heir_key)
        self._sessions.dispatch.outbox.put(subjects.worker_cancel(worker_id, me), cancel)
        reason = delta.finish_reason if delta.finish_reason in ANSWERS else None
        return AnswerSoFar(
            tokens=pack_tokens(delta.tokens), finish_reason=reason, cached_tokens=delta.cached_tokens
        )


def _listed(
    reports: Iterable[WorkerReported], wanted: dict[SequenceKey, Shadow]
) -> list[tuple[SequenceRef, str]]:
    """Return the highest attempt that a worker lists of each wanted sequence."""
    found: dict[SequenceKey, tuple[SequenceRef, str]] = {}
    for report in reports:
        for listed in report.sequences:
            key = listed.ref.key
            if key in wanted and (key not in found or found[key][0].attempt < listed.ref.attempt):
                found[key] = (listed.ref, report.worker_id)
    return list(found.values())
