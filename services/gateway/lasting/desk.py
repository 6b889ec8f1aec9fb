"""Answers that outlive their connection and their gateway: one task writes an answer into a transcript, which
connections read. Another gateway (the heir) has a copy of the request and continues when this one is gone; a
gateway that lacks an answer claims it (docs/gateways.md)."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Any

from starlette.types import Message

from services.gateway.config import GatewayConfig
from services.gateway.errors import HttpError, ShuttingDown
from services.gateway.exchange import Exchange, Legacy
from services.gateway.http.completion_response import CompletionResponse, Lasting
from services.gateway.lasting.peers import Peers, origin_of
from services.gateway.lasting.transcript import Transcript
from shared import log, metrics, subjects
from shared.bus import Endpoint, Listener, fenced
from shared.clock import Clock, monotonic_s
from shared.errors import KvasirError, UnavailableError
from shared.liveness import Start
from shared.messages.base import Empty
from shared.messages.reports import GatewayReported
from shared.messages.sequence import TOKEN_BYTES, pack_tokens
from shared.messages.shadows import AnswerSoFar, ClaimAnswer, ClaimedAnswer, Shadow, TellShadows

_logger = log.get_logger("gateway.lasting")
_CLAIM_S = 8.0
"""Seconds for another gateway to hand over an answer, or to be declared gone."""
_AGAIN_S = 0.1
_YOUNG_S = 0.5
"""Seconds that a new gateway waits for heartbeats of others before it treats a name as new."""
_RETRY_S = 0.5
_RETELL_S = 0.5
_MOST_GONE = 64

HANDLERS = (
    Endpoint(subjects.gateway_shadow.to, TellShadows, "on_told", sender="sender"),
    Endpoint(subjects.gateway_claim.to, ClaimAnswer, "on_claim", sender="sender"),
    Listener(subjects.ANY_GATEWAY_REPORTED, GatewayReported, "on_gateway_reported", sender="gateway_id"),
)


def name_of(tenant: str, kind: str, name: str) -> bytes:
    """Return the digest that identifies a request by its tenant's key digest and name."""
    digest = blake2b(digest_size=24)
    for part in (tenant, kind, name):
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part.encode("utf-8", "surrogatepass"))
    return digest.digest()


def fingerprint_of(path: str, body: bytes) -> bytes:
    """Return the digest of a path and body."""
    return blake2b(body, key=path.encode()[:64], digest_size=24).digest()


class AnswerMoved(UnavailableError):
    """The answer moved to another gateway, which a client asked for it."""

    code = "answer_moved"


MakeAnswer = Callable[[Lasting], CompletionResponse]
Reread = Callable[[Shadow], Awaitable[MakeAnswer]]
"""Reads a request of another gateway again. Raises as admission does."""


@dataclass(eq=False)
class Kept:
    """One lasting answer."""

    shadow: Shadow
    began_s: float
    """Local start; the shadow's times refer to it."""
    transcript: Transcript = field(default_factory=Transcript)
    exchange: Exchange | None = None
    readers: int = 0
    left_s: float = 0.0
    """Time since which it has no reader, or at which it ended."""
    is_wanted: bool = True
    """A client may come back for it."""
    is_counted: bool = False
    told: Start | None = None
    """The heir that has a copy, or is being sent one."""
    ignored: Sequence[str] = ()
    telling: "asyncio.Task[None] | None" = None
    abandoned: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self, exchange: Exchange) -> None:
        self.exchange = exchange

    async def receive(self) -> Message:
        """ASGI `receive` of the writing task: reports a disconnect once the answer is abandoned."""
        await self.abandoned.wait()
        return {"type": "http.disconnect"}

    @property
    def is_in_background(self) -> bool:
        """Whether it continues without readers."""
        return self.shadow.is_background and not self.transcript.is_over

    @property
    def tokens(self) -> int:
        """Number of prompt and answer tokens; 0 if it never began."""
        if self.exchange is None:
            return 0
        prompts = sum(len(prompt) // TOKEN_BYTES for prompt in self.shadow.prompts)
        return prompts + sum(len(each.stream.tokens) for each in self.exchange.sequences)

    def so_far(self) -> tuple[AnswerSoFar, ...]:
        """Return the answer so far; empty when log-probabilities are requested, as they would be missing."""
        if self.exchange is None or any(s.top_logprobs is not None for s in self.shadow.samplings):
            return ()
        return tuple(
            AnswerSoFar(
                tokens=pack_tokens(each.stream.tokens),
                finish_reason=each.stream.finish_reason,
                cached_tokens=each.stream.cached_tokens,
            )
            for each in self.exchange.sequences
        )


class LastingDesk:
    """All lasting answers of this gateway."""

    def __init__(
        self,
        config: GatewayConfig,
        peers: Peers,
        tasks: asyncio.TaskGroup,
        now_s: Clock,
        on_over: Callable[[str, int], None] = lambda key, tokens: None,
    ) -> None:
        """`on_over` receives the key and token count of each answer that began here and ended."""
        self._on_over = on_over
        self._config = config
        self._peers = peers
        self._tasks = tasks
        self._now_s = now_s
        self._began_s = monotonic_s()
        self._kept: dict[str, Kept] = {}
        self._by_name: dict[bytes, Kept] = {}
        self._turns: dict[bytes, asyncio.Lock] = {}
        self._waiting: Counter[bytes] = Counter()
        self._news: dict[Start, tuple[list[str], list[str]]] = {}
        """Ended and dropped request ids to report, by heir."""
        self._is_telling_again = False
        self._inherited: dict[Start, list[Kept]] = {}
        """Answers taken over, by former gateway, to tell it about if it returns."""
        self.reread: Reread | None = None
        self._taken_over = metrics.counter(
            "kvasir_gateway_takeovers_total", "Answers of other gateways that this one goes on with", ("why",)
        )
        self._unshadowed = metrics.counter(
            "kvasir_gateway_unshadowed_total", "Answers that no other gateway could be told of"
        )

    # --- for the HTTP side

    @property
    def has_peers(self) -> bool:
        return self._peers.heir is not None

    @asynccontextmanager
    async def turn(self, name: bytes) -> AsyncIterator[None]:
        """Hold the lock of a name while finding or beginning its answer."""
        self._waiting[name] += 1
        try:
            async with self._turns.setdefault(name, asyncio.Lock()):
                yield
        finally:
            self._waiting[name] -= 1
            if not self._waiting[name]:
                del self._waiting[name], self._turns[name]

    async def find(self, name: bytes, fingerprint: bytes | None = None) -> Kept | None:
        """Return the answer of that name, moved here if another gateway had it; None if unknown. Raises
        HttpError 422 if the name belongs to another request, UnavailableError if its gateway does not
        reply."""
        kept = await self._found(name)
        if kept is not None and fingerprint is not None and kept.shadow.fingerprint != fingerprint:
            text = "this Idempotency-Key was sent with another request: send a new key, or the same request"
            raise HttpError(422, text, error_code="idempotency_key_reused")
        return kept

    async def is_made(self, name: bytes) -> bool:
        """Whether a gateway is producing the named answer. An orphaned one continues here."""
        async with self.turn(name):
            kept = self._by_name.get(name)
            if kept is None:
                await asyncio.sleep(self._began_s + _YOUNG_S - monotonic_s())
                answer, is_elsewhere = await self._peers.claim(name, only_asks=True)
                if answer is None or answer.shadow is None:
                    return is_elsewhere
                kept = self._take_over(answer.shadow, answer.so_far)
        return not kept.transcript.is_over

    async def cancel(self, name: bytes) -> None:
        """End the named answer on any gateway before returning. Raises UnavailableError at the timeout."""
        async with self.turn(name):
            kept = await self.find(name)
        if kept is None:
            return
        if not kept.transcript.is_over:
            self._drop(kept)
        try:
            async with asyncio.timeout(_CLAIM_S):
                await kept.transcript.ended()
        except TimeoutError:
            raise UnavailableError("the answer has not ended yet", retry_after_s=2.0) from None

    async def _found(self, name: bytes) -> Kept | None:
        if (kept := self._by_name.get(name)) is not None:
            return kept
        await asyncio.sleep(self._began_s + _YOUNG_S - monotonic_s())
        until_s = monotonic_s() + _CLAIM_S
        while True:
            answer, is_elsewhere = await self._peers.claim(name)
            if answer is not None and answer.shadow is not None:
                return self._take_over(answer.shadow, answer.so_far)
            if (kept := self._by_name.get(name)) is not None or not is_elsewhere:
                return kept
            if monotonic_s() > until_s:
                raise UnavailableError("the gateway that has this answer does not say so", retry_after_s=2.0)
            await asyncio.sleep(_AGAIN_S)

    def begin(self, shadow: Shadow, make: MakeAnswer) -> Kept:
        """Begin a new answer."""
        kept = self._keep(shadow)
        kept.is_counted = True
        self._start(self._write(kept, make, ()))
        return kept

    def leave(self, kept: Kept, *, is_complete: bool) -> None:
        """Note that a reader has left."""
        kept.readers -= 1
        if kept.readers:
            return
        kept.left_s = self._now_s()
        if not is_complete and not kept.is_wanted and not kept.transcript.is_over:
            self._drop(kept)

    # --- for the bus side

    async def on_told(self, message: TellShadows) -> Empty:
        self._peers.on_told(message)
        for shadow in message.taken:
            if shadow.takeovers:
                self._on_inherited(shadow)
        return Empty()

    async def on_claim(self, claim: ClaimAnswer) -> ClaimedAnswer:
        """Hand an answer to the gateway whose client asks for it."""
        kept = self._by_name.get(claim.name)
        if kept is None:
            return self._peers.on_claim(claim.name)
        if claim.only_asks:
            return ClaimedAnswer(owner="" if kept.transcript.is_over else self._peers.own_id)
        answer = ClaimedAnswer(shadow=self._of_now(kept), so_far=kept.so_far())
        log.canonical(_logger, "handed over", request_id=kept.shadow.request_id, to=claim.sender)
        self._drop(kept, AnswerMoved("this answer goes on at another gateway, which was asked for it"))
        return answer

    def on_gateway_reported(self, event: GatewayReported) -> None:
        if event.gateway_id == self._peers.own_id:
            return
        start = event.gateway_id, event.incarnation
        if (mine := self._inherited.pop(start, None)) is not None:
            self._start(self._peers.tell(start, *map(self._of_now, mine)))
        if (ended := self._peers.on_reported(event)) is not None:
            self._inherit(ended)

    def on_gone(self, instance: str, incarnation: int) -> None:
        """Take over from a gateway that has left the bus."""
        if self._peers.on_gone((instance, incarnation)):
            self._inherit((instance, incarnation))

    def on_tick(self) -> None:
        """Advance the timeouts. Call about ten times a second."""
        now_s = self._now_s()
        for start in self._peers.silent():
            self._inherit(start)
        self._peers.shadows.on_tick(now_s)
        self._expire(now_s)
        if self.has_peers and not self._is_telling_again:
            self._is_telling_again = True
            self._start(self._tell_again())
        for heir in list(self._news):
            ended, dropped = self._news.pop(heir)
            if self._peers.is_present(heir):
                self._start(self._peers.tell(heir, ended=ended, dropped=dropped))

    # --- inside

    def _start(self, work: Coroutine[Any, Any, object]) -> "asyncio.Task[None]":
        async def alone() -> None:
            with fenced("an answer that lasts"):
                await work

        return self._tasks.create_task(alone())

    def _keep(self, shadow: Shadow) -> Kept:
        now_s = self._now_s()
        kept = Kept(shadow, now_s, left_s=now_s, is_wanted=shadow.is_asked_for)
        self._kept[shadow.request_id] = kept
        for name in shadow.names:
            self._by_name[name] = kept
        return kept

    def _forget(self, kept: Kept, *, is_over: bool = True) -> None:
        """Remove from the tables; current readers continue. Unless `is_over`, the heir keeps its copy."""
        if self._kept.pop(kept.shadow.request_id, None) is None:
            return
        for name in kept.shadow.names:
            if self._by_name.get(name) is kept:
                del self._by_name[name]
        if is_over and kept.told is not None:
            self._news.setdefault(kept.told, ([], []))[1].append(kept.shadow.request_id)

    def _drop(self, kept: Kept, failure: KvasirError | None = None) -> None:
        """End the answer; its readers get `failure`."""
        self._forget(kept)
        if failure is not None and kept.exchange is not None and kept.readers:
            kept.exchange.fail(failure)
        else:
            kept.abandoned.set()

    def _expire(self, now_s: float) -> None:
        unread = [kept for kept in self._kept.values() if not kept.readers and not kept.is_in_background]
        for kept in unread:
            if now_s - kept.left_s > self._config.resume_s:
                self._drop(kept)
        excess = sum(len(kept.transcript.body) for kept in self._kept.values())
        excess -= self._config.resume_mb * 1024 * 1024
        ended = [kept for kept in unread if kept.transcript.is_over]
        for kept in sorted(ended, key=lambda kept: kept.left_s):
            if excess > 0:
                excess -= len(kept.transcript.body)
                self._drop(kept)

    def _of_now(self, kept: Kept) -> Shadow:
        return self._peers.as_of_now(kept.shadow, kept.began_s)

    async def _write(self, kept: Kept, make: MakeAnswer, so_far: Sequence[AnswerSoFar]) -> None:
        """Write the answer to its end. One taken over is retried while the fleet has no room."""
        shadow, transcript = kept.shadow, kept.transcript
        until_s = monotonic_s() + self._config.resume_s
        for number in count():
            name = f"{shadow.request_id}.{number}" if number else shadow.request_id
            failure = await self._written(kept, make, so_far, name)
            can_wait = isinstance(failure, UnavailableError) and not isinstance(failure, ShuttingDown)
            is_again = can_wait and shadow.takeovers > 0 and shadow.request_id in self._kept
            if not is_again or transcript.has_begun or monotonic_s() > until_s:
                break
            await asyncio.sleep(_RETRY_S)
        if kept.is_counted:
            self._on_over(shadow.key, kept.tokens)
        if not transcript.is_over:
            transcript.end(failure if isinstance(failure, Exception) else None)
        kept.left_s = self._now_s()
        if failure is not None:
            self._forget(kept, is_over=not isinstance(failure, ShuttingDown))
        elif kept.told is not None:
            self._news.setdefault(kept.told, ([], []))[0].append(shadow.request_id)

    async def _written(
        self, kept: Kept, make: MakeAnswer, so_far: Sequence[AnswerSoFar], request_id: str
    ) -> BaseException | None:
        """Write the answer once; return the error that cut it short, if any."""
        telling = asyncio.ensure_future(self.shadow(kept))
        shadow = kept.shadow
        waited_s, is_resumed = max(0.0, shadow.waited_s), shadow.takeovers > 0
        legacy = Legacy(shadow.heir_key, tuple(so_far), waited_s, is_resumed)
        answer = make(Lasting(request_id, legacy, kept.open, telling))
        kept.ignored = answer.record.ignored
        try:
            await answer({"type": "http"}, kept.receive, kept.transcript.send)
        except Exception as error:
            return error
        finally:
            telling.cancel()
        return answer.record.error

    async def _tell_again(self) -> None:
        """Send a copy of each answer that has lost its heir to a new one, one at a time."""
        try:
            for kept in list(self._kept.values()):
                is_told = kept.told is not None and self._peers.is_present(kept.told)
                if is_told or kept.transcript.is_over or not kept.transcript.has_begun:
                    continue
                kept.told = self._peers.heir
                await self._tell(kept)
                if kept.told is None:
                    break
            await asyncio.sleep(_RETELL_S)
        finally:
            self._is_telling_again = False

    async def shadow(self, kept: Kept) -> None:
        """Send a copy to the heir, if there is one; return when the heir has it."""
        if kept.told is None and (heir := self._peers.heir) is not None:
            kept.told = heir
            kept.telling = self._start(self._tell(kept))
        if kept.telling is not None:
            await asyncio.shield(kept.telling)

    async def _tell(self, kept: Kept) -> None:
        heir = kept.told
        if heir is not None and not await self._peers.tell(heir, self._of_now(kept)):
            self._unshadowed.inc()
            kept.told = None

    def _inherit(self, start: Start) -> None:
        left = self._peers.shadows.on_gone(start)
        if left:
            log.canonical(_logger, "takes over", gateway=start[0], answers=len(left))
            self._taken_over.labels("gone").inc(len(left))
            kept = [
                (self._keep(self._peers.inherited(known.shadow, known.told_s)), known.shadow)
                for known in left
            ]
            self._inherited[start] = [mine for mine, _ in kept]
            if len(self._inherited) > _MOST_GONE:
                del self._inherited[next(iter(self._inherited))]
            self._start(self._go_on(kept))

    def _on_inherited(self, shadow: Shadow) -> None:
        """Resume readers here after another gateway took over and made workers forget the sequences."""
        origin = origin_of(shadow.request_id)
        for kept in list(self._kept.values()):
            is_same = origin_of(kept.shadow.request_id) == origin
            if is_same and kept.shadow.takeovers < shadow.takeovers and kept.exchange is not None:
                self._peers.resume(kept.exchange)

    async def _go_on(self, kept: Sequence[tuple[Kept, Shadow]]) -> None:
        found = await self._peers.collect([shadow for _, shadow in kept])
        for mine, shadow in kept:
            self._start(self._answer(mine, found.get(shadow.request_id, ())))

    def _take_over(self, shadow: Shadow, so_far: Sequence[AnswerSoFar]) -> Kept:
        """Take over an answer that a client asks for; if it has none `so_far`, ask the workers for it."""
        kept = self._keep(self._peers.inherited(shadow, self._now_s()))
        self._taken_over.labels("asked for").inc()
        self._start(self._answer(kept, so_far) if so_far else self._go_on([(kept, shadow)]))
        return kept

    async def _answer(self, kept: Kept, so_far: Sequence[AnswerSoFar]) -> None:
        """Read the request again and write its answer."""
        try:
            if self.reread is None:
                raise UnavailableError("this gateway does not answer yet")
            make = await self.reread(kept.shadow)
        except Exception as error:
            _logger.warning("%s cannot be gone on with: %s", kept.shadow.request_id, error)
            kept.transcript.end(error)
            self._forget(kept)
            return
        await self._write(kept, make, so_far)
