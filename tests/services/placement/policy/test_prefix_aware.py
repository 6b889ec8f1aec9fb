"""`prefix_aware`: cached tokens draw, load repels, and without either the default decides."""

from hypothesis import given
from hypothesis import strategies as st

from services.placement.policy.contract import Room
from services.placement.policy.fit import WorstFit
from services.placement.policy.prefix_aware import PrefixAware


def room(worker: str, cached: tuple[int, int, int] = (0, 0, 0), free: int = 10_000) -> Room:
    return Room(worker, free, 10_000, 0, cached)


@st.composite
def rooms(draw: st.DrawFn) -> list[Room]:
    tokens = st.integers(0, 4000)
    return [
        Room(f"w{i}", free, 10_000, draw(st.integers(0, 9)), draw(st.tuples(tokens, tokens, tokens)))
        for i, free in enumerate(draw(st.lists(st.integers(0, 10_000), min_size=1, max_size=5)))
    ]


def test_the_worker_that_has_the_prefix_is_chosen_although_it_is_busier() -> None:
    assert PrefixAware().choose(1500, [room("w0"), room("w1", (1400, 0, 0), free=9000)]) == "w1"


def test_a_busy_worker_sheds_what_it_has_cached() -> None:
    assert PrefixAware().choose(1500, [room("w0"), room("w1", (1400, 0, 0), free=1600)]) == "w0"


def test_a_nearer_tier_is_worth_more() -> None:
    assert PrefixAware().choose(900, [room("w0", (0, 0, 800)), room("w1", (0, 800, 0))]) == "w1"
    assert PrefixAware().choose(900, [room("w0", (0, 800, 0)), room("w1", (800, 0, 0))]) == "w1"


@given(offered=rooms(), size=st.integers(1, 5000))
def test_it_chooses_one_of_the_rooms_whatever_their_order(offered: list[Room], size: int) -> None:
    chosen = PrefixAware().choose(size, offered)
    assert chosen in {one.worker_id for one in offered}
    assert PrefixAware().choose(size, offered[::-1]) == chosen


@given(offered=rooms(), size=st.integers(1, 5000))
def test_without_prefixes_it_is_the_default(offered: list[Room], size: int) -> None:
    bare = [Room(one.worker_id, one.free_tokens, one.total_tokens, one.sequences) for one in offered]
    assert PrefixAware().choose(size, bare) == WorstFit().choose(size, bare)


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
