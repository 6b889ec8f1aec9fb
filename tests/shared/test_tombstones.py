"""What one gateway has cancelled keeps nothing of another's away."""

from shared.tombstones import Tombstones
from tests.shared.messages.builders import ref


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
