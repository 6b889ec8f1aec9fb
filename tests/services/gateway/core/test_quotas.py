"""A key gets what its quota says and no more, over any stretch of time; and is told when to ask again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.quotas import Quota, Quotas, RateLimited

KEY = "digest"


def test_so_many_at_once() -> None:
    quotas = Quotas({KEY: Quota(max_concurrent=2)})
    quotas.begin(KEY, 0.0)
    quotas.begin(KEY, 0.0)
    with pytest.raises(RateLimited, match="2 requests with this key are being answered"):
        quotas.begin(KEY, 0.0)
    quotas.begin("another", 0.0)
    quotas.end(KEY, 5, 1.0)
    quotas.begin(KEY, 1.0)
    assert quotas.active(KEY) == 2


def test_tokens_are_counted_when_an_answer_ends() -> None:
    quotas = Quotas({KEY: Quota(tokens_per_minute=60)})
    quotas.begin(KEY, 0.0)
    quotas.end(KEY, 90, 0.0)
    with pytest.raises(RateLimited, match="60 tokens per minute") as caught:
        quotas.begin(KEY, 0.0)
    assert caught.value.retry_after_s == pytest.approx(31.0)
    quotas.begin(KEY, 31.0)


@given(per_minute=st.floats(0.5, 120), gaps_s=st.lists(st.floats(0, 40), min_size=1, max_size=60))
def test_requests_never_exceed_a_minutes_worth_and_the_rate(per_minute: float, gaps_s: list[float]) -> None:
    """In any stretch; and who waits as told gets in."""
    quotas, now_s, taken = Quotas({KEY: Quota(requests_per_minute=per_minute)}), 0.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        try:
            quotas.begin(KEY, now_s)
        except RateLimited as refused:
            assert refused.retry_after_s is not None and refused.retry_after_s > 0
            now_s += refused.retry_after_s + 1e-6
            quotas.begin(KEY, now_s)
        taken.append(now_s)
        quotas.end(KEY, 0, now_s)
    for first, began_s in enumerate(taken):
        for last in range(first, len(taken)):
            most = max(1.0, per_minute) + (taken[last] - began_s) * per_minute / 60
            assert last - first + 1 <= most + 1e-3


def test_a_new_quota_holds_from_then_on_and_what_runs_is_counted() -> None:
    quotas = Quotas({KEY: Quota(max_concurrent=5)})
    for _ in range(3):
        quotas.begin(KEY, 0.0)
    quotas.replace({KEY: Quota(max_concurrent=3)})
    with pytest.raises(RateLimited):
        quotas.begin(KEY, 0.0)
    quotas.replace({})
    for _ in range(3):
        quotas.end(KEY, 1, 0.0)
    assert quotas.active(KEY) == 0
