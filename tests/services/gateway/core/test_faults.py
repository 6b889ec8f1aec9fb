"""A stream whose attempts end without an answer: how often, and what its client is told."""

import pytest

from services.gateway.core.effects import StreamTiming
from services.gateway.core.stream import Faults, StreamPhase
from shared.errors import CreditorLost, InternalError
from shared.messages.sequence import FinishReason
from tests.services.gateway.core.stream_rig import TIMING, A, B, begun, delta

LOST = FinishReason.KV_LOST


def test_losses_count_while_no_token_comes_in_between() -> None:
    faults = Faults(StreamTiming(max_kv_losses=3))
    assert [faults.on_end(LOST, tokens) for tokens in (0, 0, 1, 1)] == [None] * 4
    error = faults.on_end(LOST, 1)
    assert isinstance(error, CreditorLost) and "3 times" in error.message and error.retry_after_s


def test_errors_of_scheduler_and_engines_count_together() -> None:
    faults = Faults(StreamTiming(max_internal_errors=3))
    assert not faults.on_internal_error()
    assert faults.on_end(FinishReason.ERROR, 5) is None
    assert faults.on_end(FinishReason.GATEWAY_LOST, 5) is None
    assert isinstance(faults.on_end(FinishReason.ERROR, 6), InternalError)


def test_kv_that_is_lost_again_and_again_ends_the_stream_with_a_typed_error() -> None:
    stream = begun()
    attempts = 0
    while stream.is_open:
        worker = (A, B)[attempts % 2]
        stream.on_delta(delta(stream.attempt, len(stream.tokens), (), LOST), worker, 1.0 + attempts)
        attempts += 1
        assert attempts < 100
    assert attempts == TIMING.max_kv_losses
    assert stream.phase is StreamPhase.FAILED
    with pytest.raises(CreditorLost, match="lost 5 times"):
        raise stream.failure or AssertionError("no failure")
    stream.check_integrity()
