"""By KV or by tokens: whichever is cheaper by what was measured, as far as there is room for it.

Moves divided between link and compute: nothing over a boundary, the cheaper mode first.
"""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from services.placement.core.move_mode import (
    Boundaries,
    Migration,
    Mode,
    ModeChoice,
    MoveCosts,
    MoveModes,
    WantedMove,
    divide,
)
from shared.messages.moves import MoveMode, SequenceMove
from shared.messages.reports import SequenceState
from tests.shared.messages.builders import ref, sequence_report, worker_report


def costs_of(**changes: object) -> MoveCosts:
    usual: dict[str, object] = {
        "block_tokens": 16,
        "block_bytes": 1000,
        "fingerprint": b"same",
        "link_bytes_per_s": {"a": 1e6, "b": 1e6},
        "prefill_tokens_per_s": 10_000.0,
    }
    return MoveCosts(**(usual | changes))  # type: ignore[arg-type]


def wanted(name: str, tokens: int = 160, target: str = "b") -> WantedMove:
    return WantedMove(SequenceMove(ref=ref(name), target=target), "a", tokens)


def modes(
    costs: Mapping[str, MoveCosts], *wanted_moves: WantedMove, choice: ModeChoice = "adaptive"
) -> list[MoveMode]:
    now, _ = MoveModes(choice, 0.5).divide(wanted_moves, costs, 0.0)
    return [order.mode for order in now]


def test_a_fast_link_carries_kv_and_a_slow_one_tokens() -> None:
    assert modes({"a": costs_of(), "b": costs_of()}, wanted("one")) == [MoveMode.KV]
    slow = costs_of(link_bytes_per_s={"a": 30_000.0})
    assert modes({"a": costs_of(), "b": slow}, wanted("one")) == [MoveMode.TOKENS]


def test_a_link_that_nobody_has_measured_is_tried() -> None:
    """Links are measured by what is fetched over them: one that never was would never be."""
    nothing = costs_of(link_bytes_per_s={})
    assert modes({"a": costs_of(), "b": nothing}, wanted("one")) == [MoveMode.KV]
    others = costs_of(link_bytes_per_s={"c": 30_000.0})
    assert modes({"a": costs_of(), "b": others}, wanted("one")) == [MoveMode.TOKENS], "as slow as the others"
    failed = costs_of(link_bytes_per_s={"a": 0.0})
    assert modes({"a": costs_of(), "b": failed}, wanted("one")) == [MoveMode.TOKENS]


def test_a_busy_target_is_sent_kv() -> None:
    slowish = {"link_bytes_per_s": {"a": 400_000.0}}
    assert modes({"a": costs_of(), "b": costs_of(**slowish)}, wanted("one")) == [MoveMode.TOKENS]
    busy = costs_of(busy_share=0.99, **slowish)
    assert modes({"a": costs_of(), "b": busy}, wanted("one")) == [MoveMode.KV]
    crowded = costs_of(waiting_tokens=4900, **slowish)
    assert modes({"a": costs_of(), "b": crowded}, wanted("one")) == [MoveMode.KV]


def test_workers_of_different_kv_and_unmeasured_ones_get_tokens() -> None:
    assert modes({"a": costs_of(), "b": costs_of(fingerprint=b"other")}, wanted("one")) == [MoveMode.TOKENS]
    assert modes({"a": MoveCosts(), "b": MoveCosts()}, wanted("one")) == [MoveMode.TOKENS]
    assert modes({}, wanted("one")) == [MoveMode.TOKENS]


def test_a_choice_is_obeyed() -> None:
    both = {"a": costs_of(), "b": costs_of()}
    assert modes(both, wanted("one"), choice="tokens") == [MoveMode.TOKENS]
    assert modes(both, wanted("one"), choice="kv") == [MoveMode.KV]


def test_what_is_under_way_takes_its_room_until_it_is_over() -> None:
    tight = {"a": costs_of(), "b": costs_of(link_bytes_per_s={"a": 24_000.0}, prefill_tokens_per_s=400.0)}
    chooser = MoveModes("adaptive", 0.5)
    first, _ = chooser.divide([wanted("one")], tight, 0.0)
    second, later = chooser.divide([wanted("two")], tight, 0.1)
    assert len(first) == 1 and [order.mode for order in second + first] and len(second) + len(later) == 1
    third, waits = chooser.divide([wanted("three")], tight, 0.2)
    assert not third and len(waits) == 1
    for order in (*first, *second):
        chooser.on_over(order.ref)
    assert len(chooser.divide([wanted("three")], tight, 0.3)[0]) == 1


def test_one_too_large_for_any_epoch_goes_when_nothing_else_does() -> None:
    narrow = {"a": costs_of(), "b": costs_of(link_bytes_per_s={"a": 10.0}, prefill_tokens_per_s=10.0)}
    assert len(modes(narrow, wanted("huge", tokens=100_000))) == 1


@given(st.lists(st.tuples(st.integers(1, 5000), st.sampled_from("bc")), max_size=12))
def test_each_wish_goes_now_or_later_and_boundaries_hold(drawn: list[tuple[int, str]]) -> None:
    costs = {"a": costs_of(), "b": costs_of(), "c": costs_of()}
    wanted_moves = [wanted(f"r{at}", tokens, target) for at, (tokens, target) in enumerate(drawn)]
    now, later = MoveModes("adaptive", 0.5).divide(wanted_moves, costs, 0.0)
    assert {order.ref for order in (*now, *later)} == {wanted.order.ref for wanted in wanted_moves}
    assert len(now) + len(later) == len(wanted_moves)
    size = {wanted.order.ref: wanted.tokens for wanted in wanted_moves}
    for target in "bc":
        mine = [order for order in now if order.target == target]
        tokens = [size[order.ref] for order in mine if order.mode is MoveMode.TOKENS]
        assert sum(tokens) <= 5000 or len(mine) == 1
    assert not drawn or now


def test_what_a_heartbeat_says() -> None:
    listed = sequence_report(
        ref(), SequenceState.PREFILLING, prompt_tokens=300, computed_tokens=100, allocated_blocks=7
    )
    report = worker_report(sequences=(listed,), prefill_tokens_per_s=1000.0, busy_share=0.5)
    made = MoveCosts.of(report)
    assert made.waiting_tokens == 200 and made.prefill_tokens(1.0) == 300


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
