"""What the fields of messages may hold. Every bound is checked when a message is decoded.

A reader may count on it, whoever the sender is: an id is one token of a subject, a count fits 32 bits, a
length of time is finite and not negative, and what is added to a number does not leave 64 bits.
"""

from typing import Annotated

from msgspec import Meta

MOST_COUNT = 2**31 - 1
MOST_NUMBER = 2**62
MOST_SECONDS = 1e9
"""32 years."""
MOST_TEXT_CHARS = 4096

Id = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")]
"""Of an instance, as `shared.subjects.checked_id` has it: it may become part of a subject."""
OptionalId = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{0,64}\Z")]
"""An id, or empty: nobody."""
RequestId = Annotated[str, Meta(min_length=1, max_length=200)]
"""Never part of a subject."""
Text = Annotated[str, Meta(max_length=MOST_TEXT_CHARS)]
"""For people, or compared as a whole: a model's name, a host, a reason."""

Count = Annotated[int, Meta(ge=0, le=MOST_COUNT)]
"""Of tokens, blocks, sequences, steps."""
PositiveCount = Annotated[int, Meta(ge=1, le=MOST_COUNT)]
Number = Annotated[int, Meta(ge=0, le=MOST_NUMBER)]
"""What only ever rises: incarnations, sequence numbers, bytes."""
Epoch = Annotated[int, Meta(ge=0, le=MOST_NUMBER)]
"""Of a scheduler's term. One far beyond those known is refused, see `EPOCH_REACH`."""
Choice = Annotated[int, Meta(ge=0, le=0xFFFF)]
"""Which of a request's `n` answers."""
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Priority = Annotated[int, Meta(ge=-MOST_COUNT, le=MOST_COUNT)]
"""Of a sequence: the lower, the earlier it is served, among those of its tenant."""
Weight = Annotated[float, Meta(ge=0.01, le=100)]
"""Of a tenant: how much more of what there is than one of weight 1 it gets."""


def as_count(number: int) -> int:
    """What is added up from others' counts, within the bounds of one."""
    return min(number, MOST_COUNT)


Seconds = Annotated[float, Meta(ge=0, le=MOST_SECONDS)]
SignedSeconds = Annotated[float, Meta(ge=-MOST_SECONDS, le=MOST_SECONDS)]
"""Until a moment that may be past."""


def as_seconds(length_s: float) -> float:
    """What is added up from others' lengths of time, within the bounds of one; signed."""
    return max(-MOST_SECONDS, min(length_s, MOST_SECONDS))


UnixSeconds = Annotated[float, Meta(ge=0, le=1e11)]
"""By the wall clock, since 1970."""
Rate = Annotated[float, Meta(ge=0, le=1e15)]
"""Tokens or bytes per second."""
Share = Annotated[float, Meta(ge=0, le=1)]
LogProbability = Annotated[float, Meta(le=1)]
"""Natural logarithm; minus infinity is one. Rounding may bring it a little above 0."""

Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=1e3)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-1e3, le=1e3)]
RepetitionPenalty = Annotated[float, Meta(ge=1e-3, le=1e3)]
TopLogprobs = Annotated[int, Meta(ge=0, le=100)]

LogitBias = Annotated[float, Meta(ge=-1e3, le=1e3)]
GrammarText = Annotated[str, Meta(max_length=65_536)]

HiddenState = Annotated[bytes, Meta(max_length=4 * 32_768)]
"""Packed fp32; the widest models have 16,384."""
TraceParent = Annotated[str, Meta(pattern=r"\A(00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?\Z")]
"""W3C's `traceparent`; empty: not traced."""
Digest = Annotated[bytes, Meta(max_length=64)]
"""A fingerprint, a salt; empty where there is none."""

EPOCH_REACH = 2**48
"""An epoch is the revision of a lease or little more, or milliseconds since 1970 (docs/own-scheduler.md).
What is further ahead than that is nobody's epoch: whoever obeyed it would refuse all schedulers to come."""
