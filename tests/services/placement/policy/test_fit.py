"""Best fit, worst fit, policies by name, and the index by size."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.placement import policy
from services.placement.policy.contract import Room
from services.placement.policy.fit import BestFit, WorstFit
from services.placement.policy.size_index import SizeIndex
from shared.errors import ConfigError
from tests.installed import install

ROOMS = [Room("w2", 100, 200, 1), Room("w1", 50, 200, 9), Room("w0", 50, 200, 0), Room("w3", 100, 200, 2)]


def test_best_fit_and_worst_fit() -> None:
    assert BestFit().choose(10, ROOMS) == "w0", "least room, then the lowest id"
    assert WorstFit().choose(10, ROOMS) == "w2", "most room, then the fewest sequences"


PACKAGE = """
class Elsewhere:
    def choose(self, size_tokens, rooms):
        return rooms[-1].worker_id
"""


def test_policies_are_found_by_name_ours_and_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"elsewhere": "Elsewhere", "broken": "Missing"}
    install(tmp_path, monkeypatch, "kvasir_elsewhere", PACKAGE, policy.KIND.group, points)
    assert isinstance(policy.create("best_fit"), BestFit)
    assert policy.create("elsewhere").choose(1, ROOMS) == "w3"
    assert policy.create(f"{tmp_path}/kvasir_elsewhere.py:Elsewhere").choose(1, ROOMS) == "w3"
    with pytest.raises(
        ConfigError,
        match="best_fit, broken, elsewhere, load_balance, mell, mell_eager, prefix_aware, worst_fit",
    ):
        policy.create("nonsense")
    with pytest.raises(ConfigError, match=r"broken.*kvasir_elsewhere:Missing.*has no attribute 'Missing'"):
        policy.create("broken")


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
