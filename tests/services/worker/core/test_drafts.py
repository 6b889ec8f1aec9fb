"""Drafts by prompt lookup: they follow what stood there before, and are as long as they pay."""

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from services.worker.core.drafts import MOST_ROWS, Drafts, SoFar
from tests.shared.messages.builders import ref

tokens_of = st.lists(st.sampled_from([0, 1, 256, 257, 65536, 16777216]), max_size=40)


def measured(row_s: float, most_tokens: int = 15) -> Drafts:
    """Where a step takes 10 ms, and each row more so many seconds."""
    drafts = Drafts(most_tokens)
    for rows in range(1, MOST_ROWS + 1):
        drafts.on_step(rows, 0.01 + row_s * (rows - 1))
    return drafts


def naive(tokens: list[int], most: int) -> list[int]:
    """The same, looked up one place after the other."""
    for length in (4, 3, 2):
        for start in range(len(tokens) - 1 - length, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                period = len(tokens) - start - length
                whole = list(tokens)
                while len(whole) < len(tokens) + most:
                    whole.append(whole[-period])
                return whole[len(tokens) :]
    return []


@given(tokens=tokens_of, most=st.integers(0, 8), parts=st.integers(1, 5))
def test_a_draft_is_what_followed_the_newest_tokens_where_they_stood_last(
    tokens: list[int], most: int, parts: int
) -> None:
    """Ids that hold each other's bytes are told apart, and a sequence may grow between drafts."""
    drafts = measured(0.0)
    for at in range(0, len(tokens), parts):
        drafts.make([SoFar(ref("a"), tokens[:at], 9)])
    (draft,) = drafts.make([SoFar(ref("a"), tokens, most)])
    assert [*draft, *naive(tokens, most)[len(draft) :]] == naive(tokens, most)


def lengths(drafts: Drafts, answer: list[int], sequences: int = 1) -> list[int]:
    """Of the drafts while an answer is written one token at a time."""
    found, name = [], f"r{next(NUMBERS)}"
    for at in range(8, len(answer)):
        asked = [SoFar(ref(f"{name} {number}"), answer[:at], 99) for number in range(sequences)]
        found.append(sum(map(len, drafts.make(asked))))
    return found


NUMBERS = count()
REPEATED = [1, 2, 3, 4, 5] * 12
RANDOM = [
    1,
    2,
    3,
    2,
    1,
    2,
    4,
    2,
    1,
    3,
    1,
    2,
    1,
    4,
    3,
    2,
    1,
    1,
    2,
    2,
    3,
    3,
    1,
    2,
    3,
    4,
    4,
    2,
    1,
    3,
    2,
    4,
    1,
    1,
]


def test_drafts_are_long_where_guesses_are_right_and_rows_cost_little() -> None:
    assert lengths(measured(0.0005), REPEATED)[-1] == 15
    assert lengths(measured(0.0005, most_tokens=6), REPEATED)[-1] == 6
    assert lengths(measured(0.0005), REPEATED, 3)[-1] == MOST_ROWS - 3
    assert lengths(measured(0.0005), REPEATED, MOST_ROWS) == [0] * (len(REPEATED) - 8)
    assert max(lengths(measured(0.0005), RANDOM)[-15:]) <= 4


def test_where_rows_cost_as_much_as_steps_there_are_drafts_only_where_they_are_right() -> None:
    found = lengths(measured(0.007), REPEATED)
    assert found[0] == 0 and found[-1] > 10, "guesses that are not computed are compared as well"
    assert lengths(measured(0.007), RANDOM) == [0] * (len(RANDOM) - 8)
    assert lengths(measured(0.010), REPEATED) == [0] * (len(REPEATED) - 8)


def test_without_a_measured_step_there_are_none_and_what_was_measured_is_forgotten() -> None:
    drafts = Drafts(8)
    assert lengths(drafts, REPEATED)[-1] == 0
    for _ in range(20):
        drafts.on_step(1, 0.010)
    assert lengths(drafts, REPEATED)[-1] > 0, "nothing is known of more rows: it is tried"
    for rows in range(2, 10):
        drafts.on_step(rows, 1.0)
    assert lengths(drafts, REPEATED)[-1] == 0
    for _ in range(40_000):
        drafts.on_step(1, 0.010)
    assert lengths(drafts, REPEATED)[-1] > 0


def test_what_is_known_of_sequences_is_bounded() -> None:
    drafts = measured(0.0)
    for number in range(1000):
        drafts.make([SoFar(ref(f"r{number}"), [1, 2, 1, 2], 4)])
    assert len(drafts._known) == 64
