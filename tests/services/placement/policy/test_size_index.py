"""The index by size, against a sorted list."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.placement.policy.size_index import SizeIndex


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=30), st.data(), st.integers(0, 45), st.integers(1, 5))
def test_lookups_are_those_of_a_sorted_list(
    found: list[int], data: st.DataObject, at: int, limit: int
) -> None:
    index: SizeIndex[int] = SizeIndex()
    for thing, size in enumerate(found):
        index.add(size, thing)
    gone = set(data.draw(st.lists(st.sampled_from(range(len(found))), unique=True))) if found else set()
    for thing in gone:
        index.remove(found[thing], thing)
    left = [(size, thing) for thing, size in enumerate(found) if thing not in gone]
    assert list(index) == sorted(left)
    assert bool(index) == bool(left)
    assert index.smallest() == min((size for size, _ in left), default=-1)
    assert index.largest() == max((size for size, _ in left), default=-1)
    up = [thing for size, thing in sorted(left) if size >= at]
    assert index.ascending(at, limit) == up[:limit]
    down = [thing for size, thing in sorted(left, key=lambda one: (-one[0], one[1])) if size <= at]
    assert index.descending(at, limit) == down[:limit]
