"""Answer lengths predicted mid-answer: hidden states to the predictor, revised predictions to the scheduler.
Nothing waits for these messages. If one is lost, the previous prediction stays in use."""

from typing import Annotated

from msgspec import Meta

from shared.messages.base import Message
from shared.messages.commands import LengthPrediction
from shared.messages.sequence import SequenceRef
from shared.messages.values import Count, Id, Number, PositiveCount, Text

MOST_STATE_BYTES = 32_768
MOST_STATES = 1024
"""Maximum number of states in one message."""
State = Annotated[bytes, Meta(max_length=MOST_STATE_BYTES)]
"""Hidden state of a middle layer: fp16, shape `[width]`."""


class AnswerState(Message, frozen=True, kw_only=True):
    """Hidden state of the model in the middle of an unfinished answer."""

    ref: SequenceRef
    prompt_tokens: PositiveCount
    generated_tokens: Count
    max_tokens: Count
    state: State


class WorkerObserved(Message, frozen=True, kw_only=True):
    """Worker → predictor: hidden states of running sequences."""

    worker_id: Id
    incarnation: Number
    model: Text
    """Model that the states belong to; states of different models are not comparable."""
    states: Annotated[tuple[AnswerState, ...], Meta(max_length=MOST_STATES)]


class RevisedLength(Message, frozen=True, kw_only=True):
    """Revised prediction for an unfinished answer of `generated_tokens` tokens."""

    ref: SequenceRef
    generated_tokens: Count
    prediction: LengthPrediction


class LengthsRevised(Message, frozen=True, kw_only=True):
    """Predictor → scheduler: revised predictions."""

    predictor_id: Id
    lengths: Annotated[tuple[RevisedLength, ...], Meta(max_length=MOST_STATES)]
