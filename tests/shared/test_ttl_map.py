"""A map whose entries fade."""

from shared.ttl_map import RecentMap


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
