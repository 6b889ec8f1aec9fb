"""What a stream lacks of its worker's answer is fetched once at a time, when it is due."""

from services.gateway.core.retries import MAX_FETCH_FAILURES, GapFetch, StreamTiming

TIMING = StreamTiming(fetch_grace_s=0.25, retry_s=0.2)


def test_a_gap_is_fetched_at_once_and_only_once() -> None:
    missing = GapFetch(TIMING)
    assert not missing.is_anything and not missing.begin_fetch(3, 1.0)
    missing.on_gap(9, ended=False, now_s=1.0)
    assert missing.begin_fetch(3, 1.0)
    assert not missing.begin_fetch(3, 9.0), "one is under way"
    missing.check_integrity()
    missing.forget()
    assert not missing.is_anything and not missing.begin_fetch(3, 9.0)


def test_what_a_heartbeat_lists_has_time_to_come_by_itself() -> None:
    missing = GapFetch(TIMING)
    missing.on_listed(9, ended=False, now_s=1.0)
    missing.on_listed(9, ended=False, now_s=1.2)
    assert not missing.begin_fetch(3, 1.24) and missing.begin_fetch(3, 1.25), "counted from the first"
    missing.forget()
    missing.on_listed(9, ended=False, now_s=2.0)
    assert not missing.begin_fetch(9, 3.0) and not missing.is_anything, "it came"


def test_an_end_is_fetched_although_no_token_is_missing() -> None:
    missing = GapFetch(TIMING)
    missing.on_listed(9, ended=True, now_s=1.0)
    assert missing.begin_fetch(9, 1.25)


def test_failures_are_repeated_later_and_counted_in_a_row() -> None:
    missing = GapFetch(TIMING)
    missing.on_gap(9, ended=False, now_s=1.0)
    for count in range(1, MAX_FETCH_FAILURES + 1):
        now_s = 1.0 + count
        assert missing.begin_fetch(3, now_s)
        assert missing.on_failed(now_s) is (count == MAX_FETCH_FAILURES)
        assert not missing.begin_fetch(3, now_s + 0.19)
        missing.check_integrity()
