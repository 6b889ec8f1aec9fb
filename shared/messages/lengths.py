"""Lengths learned while answers are written: hidden states to who predicts, new predictions to who plans.

Neither is waited for by anybody, and either may be lost: the prediction before stays.
"""

from typing import Annotated

from msgspec import Meta

from shared.messages.base import Message
from shared.messages.commands import LengthPrediction
from shared.messages.sequence import SequenceRef
from shared.messages.values import Count, Id, Number, PositiveCount, Text

MOST_STATE_BYTES = 32_768
MOST_STATES = 1024
"""In one message."""
State = Annotated[bytes, Meta(max_length=MOST_STATE_BYTES)]
"""fp16, `[width]` of a middle layer."""


class AnswerState(Message, frozen=True, kw_only=True):
    """What a model has in mind in the middle of an answer that goes on."""

    ref: SequenceRef
    prompt_tokens: PositiveCount
    generated_tokens: Count
    max_tokens: Count
    state: State


class WorkerObserved(Message, frozen=True, kw_only=True):
    """Worker → predictor."""

    worker_id: Id
    incarnation: Number
    model: Text
    """States of different models have nothing to do with each other."""
    states: Annotated[tuple[AnswerState, ...], Meta(max_length=MOST_STATES)]


class RevisedLength(Message, frozen=True, kw_only=True):
    """Of an answer that had so many tokens, and goes on."""

    ref: SequenceRef
    generated_tokens: Count
    prediction: LengthPrediction


class LengthsRevised(Message, frozen=True, kw_only=True):
    """Predictor → scheduler."""

    predictor_id: Id
    lengths: Annotated[tuple[RevisedLength, ...], Meta(max_length=MOST_STATES)]
