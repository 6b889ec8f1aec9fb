"""One HTTP request: its sequences, its deadline and its wake-up event."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from hashlib import blake2b

from services.gateway.core.stream import Stream, StreamPhase
from services.gateway.counters import ModelFigures
from shared import log, spans
from shared.clock import monotonic_s
from shared.errors import DeadlineExceeded, InternalError, InvalidRequest, NoResponder
from shared.messages.sequence import NOBODY, Sampling, SequenceSpec, Tenant, pack_tokens
from shared.messages.shadows import AnswerSoFar

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
_logger = log.get_logger("gateway.exchange")


@dataclass(slots=True, eq=False)
class OpenChoice:
    """A stream and the data to submit it again."""

    stream: Stream
    prompt: bytes
    sampling: Sampling
    exchange: "Exchange"
    heard_s: float = 0.0
    deaths: int = 0
    """Number of workers that died while they ran it."""
    _told: tuple[int, StreamPhase, bool] = (0, StreamPhase.OPEN, False)
    _terms: tuple[int, int] = (0, 0)
    """Number of schedulers since the last new token, and the number of tokens."""

    def outlasts(self, most: int) -> bool:
        """Count a new scheduler; return whether more than `most` came and went without a new token."""
        tokens = len(self.stream.tokens)
        self._terms = (self._terms[0] + 1 if tokens == self._terms[1] else 1, tokens)
        return self._terms[0] > most

    def has_news(self) -> bool:
        """Whether tokens, phase or acceptance have changed since the last call."""
        now = (len(self.stream.tokens), self.stream.phase, self.stream.accepted)
        told, self._told = self._told, now
        return told != now

    @property
    def fingerprint(self) -> bytes:
        """Digest of the tenant, model and prompt."""
        exchange = self.exchange
        about = f"{exchange.tenant.name}/{exchange.model}/".encode()
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
            priority=exchange.priority,
            tenant=exchange.tenant,
            open_tokens=self.stream.open_tokens(self.sampling.max_tokens),
            capability=self.stream.capability,
            heir_digest=exchange.heir_digest,
            is_resumed=exchange.is_resumed or self.stream.accepted,
            runs_alone=self.deaths >= ALONE_AFTER,
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
