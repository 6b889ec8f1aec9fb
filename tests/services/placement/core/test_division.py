"""Moves divided between link and compute: nothing over a boundary, the cheaper mode first."""

from hypothesis import given
from hypothesis import strategies as st

from services.placement.core.move_mode import Boundaries, Migration, Mode, divide

WORKERS = ("a", "b", "c")


def migration(name: str, kv_bytes: int, tokens: int, target: str = "b") -> Migration:
    return Migration(name, "a", target, kv_bytes, tokens)


def test_each_goes_the_cheaper_way_while_there_is_room() -> None:
    fast_link = Boundaries({("a", "b"): 1000}, {"b": 100})
    assert divide([migration("one", 400, 80)], fast_link) == {"one": Mode.KV}
    slow_link = Boundaries({("a", "b"): 450}, {"b": 1000})
    assert divide([migration("one", 400, 80)], slow_link) == {"one": Mode.TOKENS}


def test_what_is_full_sends_the_rest_the_other_way_and_then_to_the_next_epoch() -> None:
    boundaries = Boundaries({("a", "b"): 1000}, {"b": 100})
    moves = [migration("large", 600, 90), migration("middle", 500, 70), migration("small", 450, 60)]
    assert divide(moves, boundaries) == {"large": Mode.KV, "middle": Mode.TOKENS, "small": Mode.LATER}


def test_without_a_link_all_go_by_tokens() -> None:
    assert divide([migration("one", 400, 80)], Boundaries({}, {"b": 100})) == {"one": Mode.TOKENS}
    assert divide([migration("one", 400, 80)], Boundaries({}, {})) == {"one": Mode.LATER}


ways = st.dictionaries(st.tuples(st.sampled_from(WORKERS), st.sampled_from(WORKERS)), st.integers(0, 500))
moves = st.lists(
    st.builds(
        Migration,
        name=st.text("xyz", min_size=1, max_size=4),
        source=st.sampled_from(WORKERS),
        target=st.sampled_from(WORKERS),
        kv_bytes=st.integers(1, 300),
        tokens=st.integers(1, 300),
    ),
    max_size=20,
    unique_by=lambda one: one.name,
)


@given(moves, ways, st.dictionaries(st.sampled_from(WORKERS), st.integers(0, 500)), st.randoms())
def test_no_boundary_is_exceeded_and_the_order_of_the_question_does_not_matter(
    asked: list[Migration], links: dict[tuple[str, str], int], workers: dict[str, int], dice: object
) -> None:
    boundaries = Boundaries(links, workers)
    modes = divide(asked, boundaries)
    assert modes.keys() == {one.name for one in asked}
    for way in {(one.source, one.target) for one in asked}:
        used = sum(
            one.kv_bytes for one in asked if (one.source, one.target) == way and modes[one.name] is Mode.KV
        )
        assert used <= links.get(way, 0)
    for target in WORKERS:
        used = sum(one.tokens for one in asked if one.target == target and modes[one.name] is Mode.TOKENS)
        assert used <= workers.get(target, 0)
    dice.shuffle(asked)  # type: ignore[attr-defined]
    assert divide(asked, boundaries) == modes
