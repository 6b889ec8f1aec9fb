"""The order of creditors, kept sorted."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.ledger.core.debt_ledger import Ranking


def test_neighbours_then_others_then_those_without_anything_left() -> None:
    ranking = Ranking()
    for worker, host, left in (("a", "h", 1), ("b", "h", 0), ("c", "g", 9), ("d", "g", -4), ("e", "", 5)):
        ranking.put(worker, host, left)
    assert list(ranking.best("h")) == ["a", "c", "e", "b", "d"]
    assert list(ranking.best("")) == ["c", "e", "a", "b", "d"]
    ranking.put("a", "g", -9)
    ranking.remove("c")
    ranking.remove("nobody")
    assert list(ranking.best("g")) == ["e", "d", "a", "b"]
    ranking.check_integrity()


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.sampled_from(["", "h", "g"]), st.none() | st.integers(-9, 9)),
        max_size=40,
    ),
    st.sampled_from(["", "h", "g", "x"]),
)
def test_any_history_is_sorted_like_the_rule(moves: list[tuple[str, str, int | None]], host: str) -> None:
    ranking, left_of = Ranking(), dict[str, tuple[str, int]]()
    for worker, at, left in moves:
        if left is None:
            ranking.remove(worker)
            left_of.pop(worker, None)
        else:
            ranking.put(worker, at, left)
            left_of[worker] = (at, left)
        ranking.check_integrity()

    def rule(worker: str) -> tuple[bool, bool, int, str]:
        at, left = left_of[worker]
        return left <= 0, not (host and at == host), -left, worker

    assert list(ranking.best(host)) == sorted(left_of, key=rule)
