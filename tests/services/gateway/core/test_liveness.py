"""What silence asks for: an audit, a hand-over, an end."""

from services.gateway.core.retries import MAX_AUDIT_FACTOR, SignsOfLife, StreamTiming

TIMING = StreamTiming(frame_timeout_s=3.0, give_up_s=60.0)


def test_audits_come_ever_more_rarely_until_the_worker_is_heard() -> None:
    signs = SignsOfLife(TIMING, 0.0)
    assert not signs.is_audit_due(2.9)
    assert signs.is_audit_due(3.0) and not signs.is_audit_due(5.9)
    assert signs.is_audit_due(6.0) and signs.is_audit_due(3.0 * MAX_AUDIT_FACTOR)
    assert signs.is_audit_due(3.0 * MAX_AUDIT_FACTOR), "and not more rarely than that"
    signs.check_integrity()
    signs.on_worker(20.0)
    assert not signs.is_audit_due(22.9) and signs.is_audit_due(23.0)


def test_the_schedulers_word_is_none_of_the_workers() -> None:
    signs = SignsOfLife(TIMING, 0.0)
    signs.on_scheduler(5.0)
    assert signs.is_worker_silent(6.0) and not signs.is_audit_due(6.0)
    signs.on_worker(6.0)
    assert not signs.is_worker_silent(11.9) and signs.is_worker_silent(12.0)


def test_a_stream_that_nobody_answers_fails_with_a_typed_error() -> None:
    signs = SignsOfLife(TIMING, 0.0)
    signs.on_scheduler(1.0)
    assert signs.error(60.9) is None
    error = signs.error(61.0)
    assert error is not None and "60 s" in error.message
