"""One HTTP request: its sequences, its deadline, and the event that wakes whoever writes its answer."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass, field

from services.gateway.core.stream import Stream, StreamPhase
from services.gateway.errors import ClientGone
from services.gateway.vllm_metrics import ModelFigures
from shared import log, spans
from shared.clock import monotonic_s
from shared.errors import DeadlineExceeded, InternalError, InvalidRequest, KvasirError, NoResponder
from shared.messages.sequence import NOBODY, Sampling, SequenceSpec, Tenant, pack_tokens
from shared.messages.shadows import AnswerSoFar

HEADER = "X-Request-Timeout"


@dataclass(frozen=True, slots=True)
class Legacy:
    """Of a request that outlives its gateway."""

    heir_key: bytes = b""
    """What another gateway takes it over with."""
    so_far: tuple[AnswerSoFar, ...] = ()
    """What is there already of each sequence; none: nothing is."""
    waited_s: float = 0.0
    """Since it was accepted, elsewhere."""
    is_resumed: bool = False
    """Another gateway had begun it: it is not refused for overload."""


NO_LEGACY = Legacy()


@dataclass(frozen=True, slots=True)
class Deadline:
    """How long a client waits for its whole answer, from its headers on. Without `timeout_s`: for ever."""

    began_s: float = 0.0
    timeout_s: float | None = None

    def remaining_s(self) -> float | None:
        """Never below 0; None when there is no deadline."""
        if self.timeout_s is None:
            return None
        return max(0.0, self.began_s + self.timeout_s - monotonic_s())

    def error(self) -> DeadlineExceeded:
        """What the client is told."""
        return DeadlineExceeded(f"the answer was not complete within the {self.timeout_s:g} s asked for")

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Ends what runs inside when the time is over. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(self.remaining_s()) as limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise self.error() from None


NONE = Deadline()


def deadline_of(header: str | None, default_s: float | None, longest_s: float, began_s: float) -> Deadline:
    """From `X-Request-Timeout`, else from the configuration.

    Raises InvalidRequest for what is no number of seconds above 0 and up to `longest_s`.
    """
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


_logger = log.get_logger("gateway.exchange")


@dataclass(slots=True, eq=False)
class OpenChoice:
    """A stream together with what it takes to submit it again."""

    stream: Stream
    prompt: bytes
    sampling: Sampling
    exchange: "Exchange"
    accepted_s: float
    context: Context
    """Of the request that began it, so that its trace goes along with every submission."""
    cache_salt: bytes = b""
    model: str = ""
    priority: int = 0
    tenant: Tenant = NOBODY
    figures: ModelFigures | None = None
    """Of its model, once it has tokens."""
    heard_s: float = 0.0
    """When tokens of it came last."""
    heir_digest: bytes = b""
    """Who may take it over from this gateway; empty: nobody."""
    is_resumed: bool = False
    """Another gateway had begun it."""

    _told: tuple[int, StreamPhase, bool] = (0, StreamPhase.OPEN, False)

    def has_news(self) -> bool:
        """Since it was last asked: tokens, an end, or being accepted."""
        now = (len(self.stream.tokens), self.stream.phase, self.stream.accepted)
        told, self._told = self._told, now
        return told != now

    def spec(self, gateway_id: str, gateway_incarnation: int, now_s: float) -> SequenceSpec:
        """Everything needed to compute it, or to go on with it."""
        return SequenceSpec(
            ref=self.stream.ref,
            gateway_id=gateway_id,
            gateway_incarnation=gateway_incarnation,
            prompt=self.prompt,
            sampling=self.sampling,
            generated=pack_tokens(self.stream.tokens),
            waited_s=max(0.0, now_s - self.accepted_s),
            deadline_in_s=self.exchange.deadline.remaining_s(),
            cache_salt=self.cache_salt,
            model=self.model,
            priority=self.priority,
            tenant=self.tenant,
            open_tokens=self.stream.open_tokens(self.sampling.max_tokens),
            capability=self.stream.capability,
            heir_digest=self.heir_digest,
            is_resumed=self.is_resumed or self.stream.accepted,
            traceparent=spans.current_traceparent(),
        )


@dataclass(slots=True, eq=False)
class Exchange:
    """The sequences of one request.

    `changed` is set whenever one of them, or the client's presence, changes.
    """

    sequences: list[OpenChoice] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_gone: bool = False
    """The client has closed the connection."""
    deadline: Deadline = field(default_factory=Deadline)
    failure: KvasirError | None = None
    """Of the request as a whole."""
    on_news: Callable[[], bool] | None = None
    """Called at once when a sequence has news; True when nobody needs to be woken for it."""

    def notify(self) -> None:
        """A sequence has news. Never raises: what `on_news` raises is the failure of this request alone."""
        try:
            if self.on_news is not None and self.on_news():
                return
        except Exception as error:
            _logger.exception("an answer could not be written")
            self.failure = InternalError(f"{type(error).__name__}: {error}")
        self.changed.set()

    def leave(self) -> None:
        """The client is gone."""
        self.is_gone = True
        self.changed.set()

    def fail(self, error: KvasirError) -> None:
        """It ends here, with this error."""
        self.failure = error
        self.changed.set()

    async def wait(self) -> None:
        """Until something changed since the last wait. Raises as `check` does.

        Ends in any case: a stream that nobody answers for fails by itself.
        """
        await self.changed.wait()
        self.changed.clear()
        self.check()

    def check(self) -> None:
        """Raises ClientGone, DeadlineExceeded once it has expired, or the failure of a sequence."""
        if self.is_gone:
            raise ClientGone
        if self.failure is not None:
            raise self.failure
        for sequence in self.sequences:
            if sequence.stream.phase is StreamPhase.FAILED:
                raise sequence.stream.failure or InternalError("a sequence failed without saying why")


async def admitted(exchange: Exchange, timeout_s: float) -> None:
    """Returns when every sequence is in a scheduler's hands. Nothing has been sent to the client before.

    Raises what refused one of them, ClientGone, or NoResponder when no scheduler answered in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while not all(sequence.stream.accepted for sequence in exchange.sequences):
                await exchange.wait()
    except TimeoutError:
        left = [sequence for sequence in exchange.sequences if not sequence.stream.accepted]
        text = f"no scheduler took {len(left)} of {len(exchange.sequences)} sequences within {timeout_s:g} s"
        raise NoResponder(text, retry_after_s=2.0) from None
    exchange.check()
