"""What is said about one migration, and what becomes of it when blocks cannot be fetched."""

from services.scheduler.core.moves import Move, MoveStage, pull_of, rehearsal_of
from shared.messages.moves import BlocksPulled, MoveMode
from shared.messages.sequence import Sampling, SequenceRef, SequenceSpec, pack_tokens, unpack_tokens

REF = SequenceRef(request_id="r", choice=0, attempt=1)
SPEC = SequenceSpec(
    ref=REF,
    gateway_id="g",
    gateway_incarnation=1,
    prompt=pack_tokens([1, 2, 3]),
    sampling=Sampling(seed=0, max_tokens=9),
    cache_salt=b"salt",
)


def move() -> Move:
    return Move(REF, "a", "b", MoveMode.KV, began_s=1.0, deadline_s=9.0)


def test_the_newest_token_is_not_fetched_because_it_has_no_kv() -> None:
    order = pull_of(move(), SPEC, (4, 5), 7, 3.0)
    assert unpack_tokens(order.tokens) == [1, 2, 3, 4]
    assert (order.source, order.source_incarnation, order.cache_salt) == ("a", 7, b"salt")


def test_a_rehearsal_has_all_tokens_as_its_prompt_and_no_reader() -> None:
    made = rehearsal_of(move(), SPEC, (4, 5), 3)
    assert unpack_tokens(made.prompt) == [1, 2, 3, 4, 5] and made.rehearsal
    assert made.ref.request_id == "r~3" and made.sampling.max_tokens == 1


def test_a_fetch_that_brings_nothing_is_no_step_ahead() -> None:
    one = move()
    assert one.note_pull(BlocksPulled(held_tokens=32, fetched_blocks=2, fetched_bytes=100))
    assert not one.note_pull(BlocksPulled(held_tokens=32))
    assert (one.rehearsed_tokens, one.moved_bytes) == (32, 100)
    one.fall_back("gone")
    assert (one.mode, one.rounds, one.rehearsed_tokens) == (MoveMode.TOKENS, 0, 0)
    said = one.over("", 3.0)
    assert (said.fallback, said.moved_bytes, said.mode) == ("gone", 100, MoveMode.TOKENS)


def test_times_are_split_at_the_switch() -> None:
    one = move()
    assert (one.over("late", 4.0).prepare_s, one.over("late", 4.0).switch_s) == (3.0, 0.0)
    one.stage, one.prepared_s = MoveStage.SWITCHING, 3.0
    assert (one.over("", 4.0).prepare_s, one.over("", 4.0).switch_s) == (2.0, 1.0)
