"""The running average, maps whose entries expire, releases, and shares of a full queue."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.average import averaged
from shared.messages.sequence import is_beyond_share
from shared.release import PROTOCOL, ReleaseWatch, works_with
from shared.tombstones import Tombstones
from shared.ttl_map import RecentMap
from tests.shared.messages.builders import ref


def test_the_first_counts_whole_and_an_old_one_ever_less() -> None:
    value = averaged(None, 2.0, 0.1)
    assert value == 2.0
    assert averaged(value, 4.0, 0.1) == pytest.approx(2.2)
    for _ in range(100):
        value = averaged(value, 4.0, 0.1)
    assert value == pytest.approx(4.0, abs=1e-3)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_it_lies_between_what_was_measured(measured: list[float], weight: float) -> None:
    value: float | None = None
    for one in measured:
        value = averaged(value, one, weight)
    assert value is not None
    assert min(measured) - 1e-6 <= value <= max(measured) + 1e-6


def test_entries_are_there_for_their_time_only() -> None:
    recent: RecentMap[str, int] = RecentMap(ttl_s=10.0, limit=100)
    recent.put("a", 1, 0.0)
    assert recent.get("a", 10.0) == 1
    assert recent.get("a", 10.1) is None
    assert recent.get("b", 0.0) is None
    assert recent.get("a") == 1, "not forgotten yet"
    recent.expire(10.1)
    assert recent.get("a") is None


def test_putting_again_renews() -> None:
    recent: RecentMap[str, int] = RecentMap(ttl_s=10.0, limit=100)
    recent.put("a", 1, 0.0)
    recent.put("b", 2, 1.0)
    recent.put("a", 3, 9.0)
    recent.expire(12.0)
    assert recent.items() == [("a", 3)]


def test_the_oldest_makes_room() -> None:
    recent: RecentMap[int, int] = RecentMap(ttl_s=10.0, limit=3)
    for number in range(5):
        recent.put(number, number, 0.0)
    assert [key for key, _ in recent.items()] == [2, 3, 4]
    recent.pop(3)
    recent.pop(3)
    assert len(recent) == 2


def test_an_attempt_and_every_lower_one_of_that_gateway_alone() -> None:
    stones = Tombstones(ttl_s=10.0, limit=100)
    stones.put("gateway-0", ref("a", 3), 0.0)
    stones.put("gateway-0", ref("a", 2), 1.0)
    assert [stones.covers("gateway-0", ref("a", attempt), 1.0) for attempt in (1, 3, 4)] == [
        True,
        True,
        False,
    ]
    assert not stones.covers("gateway-1", ref("a", 1), 1.0)
    assert not stones.covers("gateway-0", ref("b", 1), 1.0)


def test_they_fade() -> None:
    stones = Tombstones(ttl_s=10.0, limit=100)
    stones.put("gateway-0", ref("a"), 0.0)
    stones.put("gateway-1", ref("b"), 5.0)
    assert stones.covers("gateway-0", ref("a"), 10.0) and not stones.covers("gateway-0", ref("a"), 10.1)
    assert stones.covers("gateway-0", ref("a")), "not forgotten yet"
    stones.expire(10.1)
    assert not stones.covers("gateway-0", ref("a")) and stones.covers("gateway-1", ref("b"))
    stones.expire(20.0)
    assert len(stones) == 0


def test_a_gateway_crowds_nobody_else_s_out() -> None:
    """Keeps one that cancels whatever comes to its mind from bringing another's cancelled sequences back."""
    stones = Tombstones(ttl_s=10.0, limit=3)
    stones.put("gateway-0", ref("a"), 0.0)
    for number in range(5):
        stones.put("gateway-1", ref(f"r{number}"), 1.0)
    assert stones.covers("gateway-0", ref("a")) and len(stones) == 4
    assert [stones.covers("gateway-1", ref(f"r{number}")) for number in range(5)] == [
        False,
        False,
        *[True] * 3,
    ]


def test_one_release_apart_is_supported() -> None:
    assert [works_with(PROTOCOL + apart) for apart in (-2, -1, 0, 1, 2)] == [False, True, True, True, False]


def test_who_is_too_far_apart_is_named_once_and_again_when_it_has_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = ReleaseWatch()
    with caplog.at_level(logging.WARNING):
        told = [
            watch.note("worker-0", protocol)
            for protocol in (PROTOCOL, PROTOCOL + 2, PROTOCOL + 2, PROTOCOL + 3, PROTOCOL + 1)
        ]
    assert told == [False, True, False, True, False]
    assert len(caplog.messages) == 2 and "worker-0" in caplog.messages[0]


def test_nobody_is_refused_where_there_is_room() -> None:
    assert not is_beyond_share({"flood": 9}, "flood", 10)


def test_who_has_less_than_his_share_of_a_full_queue_may_have_more() -> None:
    full = {"flood": 9, "a": 1}
    assert is_beyond_share(full, "flood", 10)
    assert not is_beyond_share(full, "a", 10) and not is_beyond_share(full, "new", 10)
    assert is_beyond_share({"flood": 9, "a": 5}, "a", 10)


def test_there_is_an_end_to_it() -> None:
    assert is_beyond_share({str(name): 1 for name in range(20)}, "new", 10)
