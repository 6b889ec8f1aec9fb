"""A submission that fails is repeated ever more rarely; only the answer to the latest counts."""

import pytest

from services.gateway.core.effects import StreamTiming
from services.gateway.core.stream import MAX_RETRY_S, Submission


def test_only_the_latest_counts() -> None:
    submission = Submission(StreamTiming())
    settled = [submission.is_settled]
    first, second = submission.begin(), submission.begin()
    assert submission.is_latest(second) and not submission.is_latest(first)
    settled.append(submission.is_settled)
    submission.on_known()
    settled.append(submission.is_settled)
    assert settled == [True, False, True] and not submission.is_due(1e9)


def test_tries_come_ever_more_rarely_until_one_succeeds() -> None:
    submission = Submission(StreamTiming(retry_s=0.2))
    waits_s = []
    for now_s in range(20):
        submission.begin()
        submission.on_refused()
        submission.again_later(float(now_s))
        submission.check_integrity()
        assert not submission.is_settled
        waits_s.append(
            next(wait / 10 for wait in range(1, 20) if submission.is_due(now_s + wait / 10 + 1e-9))
        )
    assert waits_s[:3] == pytest.approx([0.2, 0.4, 0.8]) and set(waits_s[3:]) == {MAX_RETRY_S}
    submission.begin()
    submission.on_known()
    submission.again_later(50.0)
    assert submission.is_due(50.2), "as early as at first"
