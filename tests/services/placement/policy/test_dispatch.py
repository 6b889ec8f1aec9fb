"""Placement policies and the index by size: best fit, worst fit, load balancing, `prefix_aware`."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.placement import policy
from services.placement.policy.contract import Action, CostedPolicy, Operation, PackingPolicy, Room
from services.placement.policy.dispatch import DispatchPolicy, LoadBalance
from services.placement.policy.fit import BestFit, PrefixAware, WorstFit
from services.placement.policy.size_index import SizeIndex
from shared.errors import ConfigError, InvalidRequest
from tests.installed import install
from tests.services.placement.policy.histories import CAPACITY, World, steps


def made(name: str) -> PackingPolicy:
    if name == "load_balance":
        return LoadBalance(CAPACITY)
    return DispatchPolicy(CAPACITY, is_tight=name == "best_fit")


@settings(max_examples=60)
@given(steps, st.sampled_from(["best_fit", "worst_fit", "load_balance"]), st.integers(1, 30))
def test_every_operation_conserves_requests_and_capacity(
    history: list[tuple[int, int, int]], name: str, workers: int
) -> None:
    world, twin = World(made(name), workers), World(made(name), workers)
    for step in history:
        one = world.operation(*step)
        assert world.apply([one]) == twin.apply([one])


@pytest.mark.parametrize(("name", "home"), [("best_fit", "w0"), ("worst_fit", "w1")])
def test_the_tightest_and_the_roomiest(name: str, home: str) -> None:
    policy = made(name)
    for worker in ("w0", "w1"):
        policy.add_worker(worker)
    policy.allocate("a", 200)
    policy.allocate("b", 100)
    assert policy.allocate("c", 30).placed == {"c": home}


@pytest.mark.parametrize("workers", [1, 2])
def test_an_overflow_recomputes_the_youngest_elsewhere_or_displaces_it(workers: int) -> None:
    policy = made("best_fit")
    for worker in ("w0", "w1")[:workers]:
        policy.add_worker(worker)
    policy.allocate("old", 100)
    policy.allocate("young", 130)
    effects = policy.grow("old", 120)
    moves = [(move.request, move.target) for move in effects.moves]
    if workers == 2:
        assert (moves, effects.recomputes, effects.activated) == ([("young", "w1")], 1, ["w1"])
    else:
        assert (moves, effects.displaced) == ([], ["young"])
        assert policy.allocate("other", 200).waiting == ["other"]
        assert policy.remove_worker("w0") == ["old"] and policy.active_workers == 0
    with pytest.raises(InvalidRequest, match="borrow"):
        policy.allocate("huge", CAPACITY + 1)
    policy.check_integrity()


def test_an_epoch_ends_before_it_grows_and_grows_before_it_allocates() -> None:
    policy = made("best_fit")
    policy.add_worker("w0")
    policy.allocate("a", 100)
    policy.allocate("b", 100)
    ends, grows = Operation(Action.END, "a"), Operation(Action.GROW, "b", 200)
    effects = policy.apply([Operation(Action.ALLOCATE, "c", 40), grows, ends])
    assert effects.placed == {"c": "w0"} and not effects.moves


def unequal(relief_share: float = 1.0) -> LoadBalance:
    """`a` alone on w0; `b` and the short `f` on w1."""
    policy = LoadBalance(CAPACITY, relief_share=relief_share)
    for worker in ("w0", "w1"):
        policy.add_worker(worker)
    for request, blocks in (("a", 100), ("b", 150), ("c", 20), ("d", 20), ("e", 20), ("f", 20)):
        policy.allocate(request, blocks)
    for request in "cde":
        policy.end(request)
    assert [policy.worker_of(request) for request in "abf"] == ["w0", "w1", "w1"]
    return policy


def test_an_epoch_sends_the_shortest_of_the_most_loaded_to_the_least_loaded() -> None:
    policy = unequal()
    effects = policy.apply([])
    assert [(move.request, move.source, move.target) for move in effects.moves] == [("f", "w1", "w0")]
    assert policy.apply([]).moves == []
    policy.check_integrity()
    assert unequal(relief_share=0.1).apply([]).moves == [], "workers with enough memory keep their requests"


def test_load_balance_migrates_the_shortest_on_an_overflow() -> None:
    policy = unequal()
    effects = policy.grow("b", 230)
    assert [move.request for move in effects.moves] == ["f"] and effects.recomputes == 0
    policy.check_integrity()


def room(worker: str, cached: tuple[int, int, int] = (0, 0, 0), free: int = 10_000) -> Room:
    return Room(worker, free, 10_000, 0, cached)


@st.composite
def rooms(draw: st.DrawFn) -> list[Room]:
    tokens = st.integers(0, 4000)
    return [
        Room(f"w{i}", free, 10_000, draw(st.integers(0, 9)), draw(st.tuples(tokens, tokens, tokens)))
        for i, free in enumerate(draw(st.lists(st.integers(0, 10_000), min_size=1, max_size=5)))
    ]


@pytest.mark.parametrize(
    ("size", "offered"),
    [
        (1500, [room("w0"), room("w1", (1400, 0, 0), free=9000)]),  # cached there, although it is busier
        (1500, [Room("w0", 1600, 10_000, 6, (1400, 0, 0)), room("w1")]),  # a busy one sheds what it caches
        (900, [room("w0", (0, 0, 800)), room("w1", (0, 800, 0))]),  # a nearer tier is worth more
        (900, [room("w0", (0, 800, 0)), room("w1", (800, 0, 0))]),
        (100, [Room("w0", 3_000, 10_000, 1), Room("w1", 6_000, 10_000, 6)]),  # short: where least is held
        (2_900, [Room("w0", 6_000, 10_000, 6), Room("w1", 3_000, 10_000, 1)]),  # long: to the fewest
    ],
)
def test_the_cheaper_worker_is_chosen(size: int, offered: list[Room]) -> None:
    assert PrefixAware().choose(size, offered) == "w1"


@given(offered=rooms(), size=st.integers(1, 5000))
def test_it_chooses_one_of_the_rooms_whatever_their_order(offered: list[Room], size: int) -> None:
    chosen = PrefixAware().choose(size, offered)
    assert chosen in {one.worker_id for one in offered}
    assert PrefixAware().choose(size, offered[::-1]) == chosen


@given(offered=rooms(), size=st.integers(1, 5000))
def test_without_prefixes_it_goes_to_none_that_holds_more_for_more(offered: list[Room], size: int) -> None:
    bare = [Room(one.worker_id, one.free_tokens, one.total_tokens, one.sequences) for one in offered]
    name = PrefixAware().choose(size, bare)
    chosen = next(one for one in bare if one.worker_id == name)
    for one in bare:
        assert one.free_tokens <= chosen.free_tokens or one.sequences >= chosen.sequences
        assert one.free_tokens < chosen.free_tokens or one.sequences >= chosen.sequences


@given(offered=rooms(), size=st.integers(1, 5000), more=st.integers(1, 5000))
def test_more_cached_never_repels(offered: list[Room], size: int, more: int) -> None:
    chosen = PrefixAware().choose(size, offered)
    richer = [
        Room(
            one.worker_id,
            one.free_tokens,
            one.total_tokens,
            one.sequences,
            (one.cached_tokens[0] + more, *one.cached_tokens[1:]),
        )
        if one.worker_id == chosen
        else one
        for one in offered
    ]
    if any(sum(one.cached_tokens) for one in offered):
        assert PrefixAware().choose(size, richer) == chosen


def test_what_each_choice_costs_is_told_in_seconds() -> None:
    idle = Room("w0", 10_000, 10_000, 0, prefill_tokens_per_s=1000.0, decode_step_s=0.02)
    has_it = Room("w1", 10_000, 10_000, 0, (1400, 0, 0), 0, 1000.0, 0.02)
    waits = Room("w2", 10_000, 10_000, 0, (1400, 0, 0), 3000, 1000.0, 0.02)
    slow = Room("w3", 10_000, 10_000, 0, (1400, 0, 0), 0, 100.0, 0.02)
    new = Room("w4", 10_000, 10_000, 0, (1400, 0, 0))
    costs = PrefixAware().costs_s(1500, [idle, has_it, waits, slow, new])
    assert costs == pytest.approx([1.5, 0.1, 3.1, 1.0, 0.1])
    assert isinstance(PrefixAware(), CostedPolicy) and not isinstance(WorstFit(), CostedPolicy)


def test_a_full_worker_costs_the_time_until_there_is_room() -> None:
    full = Room("w0", 0, 10_000, 8, (1400, 0, 0), 0, 1000.0, 0.02)
    empty = Room("w1", 10_000, 10_000, 0, (0, 0, 0), 0, 1000.0, 0.02)
    with_room, without = PrefixAware().costs_s(1500, [empty, full])
    assert with_room == pytest.approx(1.5) and without > 2.5
    assert PrefixAware().choose(1500, [full, empty]) == "w1"


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


@settings(max_examples=80)
@given(st.lists(st.integers(0, 40), max_size=30), st.data(), st.integers(0, 45), st.integers(1, 5))
def test_lookups_are_as_in_a_sorted_list(found: list[int], data: st.DataObject, at: int, limit: int) -> None:
    index: SizeIndex[int] = SizeIndex()
    for thing, size in enumerate(found):
        index.add(size, thing)
    gone = set(data.draw(st.lists(st.sampled_from(range(len(found))), unique=True))) if found else set()
    for thing in gone:
        index.remove(found[thing], thing)
    left = [(size, thing) for thing, size in enumerate(found) if thing not in gone]
    assert list(index) == sorted(left) and bool(index) == bool(left)
    assert index.smallest() == min((size for size, _ in left), default=-1)
    assert index.largest() == max((size for size, _ in left), default=-1)
    up = [thing for size, thing in sorted(left) if size >= at]
    assert index.ascending(at, limit) == up[:limit]
    down = [thing for size, thing in sorted(left, key=lambda one: (-one[0], one[1])) if size <= at]
    assert index.descending(at, limit) == down[:limit]
