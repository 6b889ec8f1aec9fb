"""One HTTP request's sequences in progress, and the event that wakes whoever writes its answer."""

import asyncio
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field

from services.gateway.core.stream import Stream, StreamPhase
from services.gateway.deadline import Deadline
from services.gateway.http.body import ClientGone
from shared import log
from shared.errors import InternalError, KvasirError, NoResponder
from shared.messages.sequence import Sampling, SequenceSpec, pack_tokens

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
            open_tokens=self.stream.open_tokens(self.sampling.max_tokens),
            capability=self.stream.capability,
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

    def expire(self) -> None:
        """The deadline has passed."""
        self.fail(self.deadline.error())

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

    def waiting() -> int:
        return sum(not sequence.stream.accepted for sequence in exchange.sequences)

    try:
        async with asyncio.timeout(timeout_s):
            while waiting():
                await exchange.wait()
    except TimeoutError:
        text = f"no scheduler took {waiting()} of {len(exchange.sequences)} sequences within {timeout_s:g} s"
        raise NoResponder(text, retry_after_s=2.0) from None
    exchange.check()
