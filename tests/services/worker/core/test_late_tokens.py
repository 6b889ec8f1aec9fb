"""Tokens that come after, or before, the sequence they belong to."""

import msgspec

from services.worker.core.late_tokens import MOST_SEQUENCES, MOST_TOKENS, Latecomers, LateTokens
from services.worker.core.sequence import HeldSequence
from shared.messages.plans import Decode, ShortStart
from tests.shared.messages.builders import ref, spec


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


def waiting(open_tokens: int) -> HeldSequence:
    """Three tokens of a prompt, and room for so many from its former worker."""
    told = msgspec.structs.replace(spec(ref("a"), [1, 2, 3]), open_tokens=open_tokens)
    return HeldSequence.from_spec(told, 64, 0.0)


def test_late_tokens_join_their_sequence_and_what_never_came_is_told_once() -> None:
    late, sequence = Latecomers(), waiting(4)
    item = Decode(ref=sequence.ref, allocated_blocks=2)
    late.add(sequence.ref, 0, [10, 11])
    assert late.join(sequence, item) is item
    assert sequence.tokens == [1, 2, 3, 10, 11] and sequence.open_tokens == 2
    while sequence.open_tokens:
        late.join(sequence, item)
    assert late.take_shorts() == (ShortStart(ref=sequence.ref, missing_tokens=2),)
    assert late.take_shorts() == () and sequence.tokens == [1, 2, 3, 10, 11]


def test_who_has_waited_for_long_takes_no_more() -> None:
    late, sequence = Latecomers(), waiting(4)
    late.tick([sequence], 5.0)
    assert sequence.open_tokens == 4, "it has sampled nothing yet"
    sequence.sampled = True
    late.tick([sequence], 0.9)
    assert sequence.open_tokens == 4
    late.tick([sequence], 1.1)
    assert sequence.open_tokens == 0 and len(late.take_shorts()) == 1


def test_after_a_snapshot_nobody_waits_and_nothing_is_told() -> None:
    late, sequence = Latecomers(), waiting(4)
    late.close_all([sequence])
    assert sequence.open_tokens == 0 and late.take_shorts() == ()
