"""Gaps are averaged, dropped blocks remembered up to a bound."""

from services.worker.kv.core.eviction import ReuseHistory
from services.worker.kv.core.radix_tree import Node


def node(name: bytes, hits: int = 0) -> Node:
    made = Node(name, None)
    made.hits = hits
    return made


def test_the_gap_is_the_mean_of_the_first_uses_and_follows_later_ones() -> None:
    history = ReuseHistory()
    for gap in (10, 20, 30):
        history.on_used(100, 100 + gap)
    assert history.mean_gap == 20
    for _ in range(20_000):
        history.on_used(0, 500)
    assert 495 < history.mean_gap < 500


def test_a_dropped_block_that_comes_back_was_used_before() -> None:
    history = ReuseHistory()
    dropped = node(b"a", hits=2)
    history.on_stored(dropped, 7)
    dropped.hits = 2
    history.on_dropped(dropped)
    again, other = node(b"a"), node(b"b")
    history.on_stored(again, 57)
    history.on_stored(other, 57)
    assert (again.hits, again.used, again.inserted) == (3, 57, 57)
    assert (other.hits, other.used) == (0, 57)
    assert history.mean_gap == 50


def test_it_remembers_only_so_many() -> None:
    history = ReuseHistory(most_ghosts=2)
    for name in (b"a", b"b", b"c"):
        history.on_dropped(node(name, hits=1))
    found = []
    for name in (b"a", b"b", b"c"):
        made = node(name)
        history.on_stored(made, 1)
        found.append(made.hits)
    assert found == [0, 2, 2]
