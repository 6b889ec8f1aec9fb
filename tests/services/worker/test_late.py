"""Tokens that come after, or before, the sequence they belong to."""

from services.worker.late import MOST_SEQUENCES, MOST_TOKENS, LateTokens
from tests.services.worker.builders import ref


def test_only_what_follows_is_taken_and_only_once() -> None:
    late = LateTokens()
    late.add(ref("a"), 5, [50, 51])
    late.add(ref("a"), 8, [80])
    assert late.take(ref("a"), 4, 9) == [], "index 4 is missing"
    assert late.take(ref("a"), 5, 1) == [50]
    assert late.take(ref("a"), 6, 9) == [51], "index 7 is missing"
    late.add(ref("a"), 7, [70])
    assert late.take(ref("a"), 7, 9) == [70, 80]
    late.forget(ref("a"))
    assert len(late) == 0 and late.take(ref("a"), 0, 9) == []


def test_both_bounds_hold() -> None:
    late = LateTokens()
    late.add(ref("a"), 0, range(2 * MOST_TOKENS))
    assert len(late.take(ref("a"), 0, 1000)) == MOST_TOKENS
    for number in range(2 * MOST_SEQUENCES):
        late.add(ref(f"r{number}"), 0, [1])
    assert len(late) == MOST_SEQUENCES
