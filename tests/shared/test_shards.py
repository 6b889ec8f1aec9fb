"""Which shard a worker belongs to: evenly, and with few changes when the number of shards changes."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shared.shards import MOST_SHARDS, WHOLE, Shard, shard_of

names = st.from_regex(r"\A[A-Za-z0-9_-]{1,64}\Z")


@given(name=names, shards=st.integers(1, MOST_SHARDS - 1))
def test_one_more_shard_only_takes_workers(name: str, shards: int) -> None:
    assert shard_of(name, shards + 1) in (shard_of(name, shards), shards)


@given(name=names, count=st.integers(1, MOST_SHARDS))
def test_a_worker_is_in_exactly_one_shard(name: str, count: int) -> None:
    assert [Shard(number, count).has(name) for number in range(count)].count(True) == 1


def test_workers_are_divided_evenly() -> None:
    for shards in (2, 3, 8):
        counts = Counter(shard_of(f"worker-{number}", shards) for number in range(4096))
        assert max(counts.values()) < 1.2 * 4096 / shards and len(counts) == shards


def test_all_processes_of_all_releases_agree() -> None:
    assert [shard_of(f"worker-{number}", 2) for number in range(8)] == [0, 0, 1, 0, 0, 1, 0, 1], "changed"
    assert WHOLE.has("worker-0") and WHOLE.role == "scheduler" and Shard(3, 4).role == "scheduler.3"
