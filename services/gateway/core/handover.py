"""The attempt before a prepared hand-over, read on until the next one has caught up. Pure.

Sampling depends on seed and index, so both workers compute the same answer; what they say of one index is
compared (`Stream.on_delta`). docs/migration.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.core.effects import Acknowledge, Cancel, Extend, StreamEffects, WorkerStart
from shared.messages.sequence import FinishReason, SequenceRef
from shared.messages.tokens import TokenDelta

FRESH_S = 0.003
"""A good moment to change over: the target is not further behind the source than that."""
MOST_FRAMES = 8
"""Of the target; then any moment is good enough."""
LEFT_TOKENS = 32
"""At least so many are to follow where tokens may come late."""
OVERLAP_S = 1.0
"""A target that has said nothing by then is waited for without its source."""


@dataclass(slots=True)
class Overlap:
    """At most one for each stream."""

    ref: SequenceRef
    """The former attempt."""
    server: WorkerStart
    target: str
    open_tokens: int
    """The target takes so many more after the submission."""
    until_s: float
    heard_s: float = 0.0
    """When its last token came."""
    frames: int = 0
    """Of the target so far."""
    is_leaving: bool = False
    """Its worker has been told to stop; what it said before still counts."""

    def leave(self) -> tuple[Cancel, ...]:
        """Tells its worker to stop, once."""
        if self.is_leaving:
            return ()
        self.is_leaving = True
        return (Cancel(self.ref, self.server[0], is_final=False),)

    def open_for(self, left_tokens: int) -> int:
        """None near the answer's limit: a plan that leaves room for them would seem to reach it."""
        is_open = not self.is_leaving and left_tokens >= self.open_tokens + LEFT_TOKENS
        return self.open_tokens if is_open else 0

    def on_target(self, end: int, held: int, now_s: float) -> tuple[Cancel, ...]:
        """The target has said its token before `end`, and `held` were there: is it time to change over?"""
        self.frames += 1
        is_level = end == held and now_s - self.heard_s <= FRESH_S
        return self.leave() if end > held or is_level or self.frames >= MOST_FRAMES else ()

    def on_source(
        self, delta: TokenDelta, worker: WorkerStart, tokens: list[int], ref: SequenceRef, now_s: float
    ) -> tuple[StreamEffects, FinishReason | None]:
        """The former attempt goes on. What it adds to `tokens` is appended and, while the target (its attempt
        is `ref`) waits for it, passed on. Also how the former attempt ended, if it did.
        """
        held = len(tokens)
        if worker != self.server or delta.first_index > held:
            return (), None
        news = delta.tokens[held - delta.first_index :]
        tokens.extend(news)
        self.heard_s = now_s
        if delta.finish_reason is not None:
            return (Acknowledge(worker[0], self.ref),), delta.finish_reason
        if self.is_leaving or not news:
            return (), None
        return (Extend(self.target, ref, held, news),), None


def agrees(delta: TokenDelta, tokens: Sequence[int]) -> bool:
    """Whether it says of every index that is held already what `tokens` say."""
    first, both = delta.first_index, min(delta.first_index + len(delta.tokens), len(tokens))
    return delta.tokens[: max(0, both - first)] == tuple(tokens[first:both])
