"""Types of message fields, with the bounds that decoding enforces for every sender. Ids are valid subject
tokens, counts fit 32 bits, durations are finite and not negative, and adding to a number does not overflow 64
bits."""

from typing import Annotated

from msgspec import Meta

MOST_COUNT = 2**31 - 1
MOST_NUMBER = 2**62
MOST_SECONDS = 1e9
"""32 years."""
MOST_TEXT_CHARS = 4096

Id = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")]
"""Instance id (`shared.subjects.checked_id`); valid as a subject token."""
OptionalId = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{0,64}\Z")]
"""An id, or empty for none."""
RequestId = Annotated[str, Meta(min_length=1, max_length=200)]
"""Id of a request; never part of a subject."""
Text = Annotated[str, Meta(max_length=MOST_TEXT_CHARS)]
"""Text for display or equality checks: model name, host, reason."""

Count = Annotated[int, Meta(ge=0, le=MOST_COUNT)]
"""Number of tokens, blocks, sequences or steps."""
PositiveCount = Annotated[int, Meta(ge=1, le=MOST_COUNT)]
Number = Annotated[int, Meta(ge=0, le=MOST_NUMBER)]
"""Value that only rises: incarnation, sequence number, bytes."""
Epoch = Annotated[int, Meta(ge=0, le=MOST_NUMBER)]
"""Epoch of a scheduler's term. Values far above the known ones are refused (`EPOCH_REACH`)."""
Choice = Annotated[int, Meta(ge=0, le=0xFFFF)]
"""Index among a request's `n` answers."""
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Priority = Annotated[int, Meta(ge=-MOST_COUNT, le=MOST_COUNT)]
"""Priority of a sequence within its tenant; lower is served earlier."""
Weight = Annotated[float, Meta(ge=0.01, le=100)]
"""Weight of a tenant: its share of capacity relative to weight 1."""


def as_count(number: int) -> int:
    """Limit a sum of counts to the bounds of one."""
    return min(number, MOST_COUNT)


Seconds = Annotated[float, Meta(ge=0, le=MOST_SECONDS)]
SignedSeconds = Annotated[float, Meta(ge=-MOST_SECONDS, le=MOST_SECONDS)]
"""Seconds until a moment, negative if it has passed."""


def as_seconds(length_s: float) -> float:
    """Limit a sum of durations to the bounds of one; signed."""
    return max(-MOST_SECONDS, min(length_s, MOST_SECONDS))


UnixSeconds = Annotated[float, Meta(ge=0, le=1e11)]
"""Wall-clock time since 1970."""
Rate = Annotated[float, Meta(ge=0, le=1e15)]
"""Tokens or bytes per second."""
Share = Annotated[float, Meta(ge=0, le=1)]
LogProbability = Annotated[float, Meta(le=1)]
"""Natural log-probability, possibly minus infinity. Rounding may put it slightly above 0."""

Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=1e3)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-1e3, le=1e3)]
RepetitionPenalty = Annotated[float, Meta(ge=1e-3, le=1e3)]
TopLogprobs = Annotated[int, Meta(ge=0, le=100)]

LogitBias = Annotated[float, Meta(ge=-1e3, le=1e3)]
GrammarText = Annotated[str, Meta(max_length=65_536)]

HiddenState = Annotated[bytes, Meta(max_length=4 * 32_768)]
"""Packed fp32 hidden state; the widest models have 16,384 values."""
TraceParent = Annotated[str, Meta(pattern=r"\A(00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?\Z")]
"""W3C `traceparent`; empty: not traced."""
Digest = Annotated[bytes, Meta(max_length=64)]
"""Fingerprint or salt; empty: none."""

EPOCH_REACH = 2**48
"""Maximum distance of a new epoch from known ones. Epochs are lease revisions or Unix milliseconds
(docs/own-scheduler.md). Accepting a larger one would lock out all future schedulers."""
