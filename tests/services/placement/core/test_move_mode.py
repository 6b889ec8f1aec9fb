"""Moves by KV or by tokens: the cheaper one by what workers measured, within the budgets of an epoch."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.placement.core.move_mode import (
    Migration,
    ModeChoice,
    MoveModes,
    WantedMove,
    computable_tokens,
    divide,
)
from shared.messages.moves import MoveMode, SequenceMove
from shared.messages.reports import SequenceState, WorkerReported
from tests.shared.messages.builders import ref, sequence_report, worker_report

KV, TOKENS = MoveMode.KV, MoveMode.TOKENS


def measured(**changes: Any) -> WorkerReported:
    usual: dict[str, Any] = {
        "block_tokens": 16,
        "kv_block_bytes": 1000,
        "fingerprint": b"same",
        "link_bytes_per_s": {"a": 1e6, "b": 1e6},
        "prefill_tokens_per_s": 10_000.0,
    }
    return worker_report(**(usual | changes))


def wanted(name: str, tokens: int = 160, target: str = "b") -> WantedMove:
    return WantedMove(SequenceMove(ref=ref(name), target=target), "a", tokens)


def mode(target: WorkerReported, choice: ModeChoice = "adaptive", tokens: int = 160) -> MoveMode:
    reports = {"a": measured(), "b": target}
    (order,) = MoveModes(choice, 0.5).divide([wanted("one", tokens)], reports, 0.0)
    return order.mode


def test_the_cheaper_mode_is_chosen() -> None:
    slowish = {"link_bytes_per_s": {"a": 400_000.0}}
    crowd = sequence_report(ref(), SequenceState.WAITING, prompt_tokens=4900)
    assert mode(measured()) is KV
    assert mode(measured(link_bytes_per_s={"a": 30_000.0})) is TOKENS, "a slow link"
    assert mode(measured(**slowish)) is TOKENS
    assert mode(measured(busy_share=0.99, **slowish)) is KV, "the target is busy"
    assert mode(measured(sequences=(crowd,), **slowish)) is KV, "prompts wait there"
    assert mode(measured(fingerprint=b"other")) is TOKENS, "KV of another kind"
    assert mode(measured(), "tokens") is TOKENS
    assert mode(measured(fingerprint=b"other"), "kv") is KV, "as configured"
    narrow = measured(link_bytes_per_s={"a": 10.0}, prefill_tokens_per_s=10.0)
    assert mode(narrow, tokens=100_000) is TOKENS, "too large for any epoch, but nothing else goes there"
    (order,) = MoveModes("adaptive", 0.5).divide([wanted("one")], {}, 0.0)
    assert order.mode is TOKENS, "nothing was measured"


def test_an_unmeasured_link_is_tried() -> None:
    """Links are measured by what is fetched over them: one that never was would never be."""
    assert mode(measured(link_bytes_per_s={})) is KV
    assert mode(measured(link_bytes_per_s={"c": 30_000.0})) is TOKENS, "as slow as the others"
    assert mode(measured(link_bytes_per_s={"a": 0.0})) is TOKENS


def test_moves_under_way_use_their_budget_until_they_are_over() -> None:
    target = measured(link_bytes_per_s={"a": 24_000.0}, prefill_tokens_per_s=400.0)
    tight = {"a": measured(), "b": target}
    chooser = MoveModes("adaptive", 0.5)
    (first,) = chooser.divide([wanted("one")], tight, 0.0)
    assert first.mode is TOKENS
    (second,) = chooser.divide([wanted("two")], tight, 0.1)
    assert second.mode is KV and chooser.divide([wanted("three")], tight, 0.2) == []
    chooser.on_over(first.ref)
    (third,) = chooser.divide([wanted("three")], tight, 0.3)
    assert (third.mode, chooser.counts) == (TOKENS, {"kv": 1, "tokens": 2, "later": 1})
    assert chooser.divide([wanted("four")], tight, 60.0), "the others were forgotten"


@given(st.lists(st.tuples(st.integers(1, 5000), st.sampled_from("bc")), max_size=12))
def test_moves_of_an_epoch_stay_within_the_budgets(drawn: list[tuple[int, str]]) -> None:
    reports = {name: measured() for name in "abc"}
    wanted_moves = [wanted(f"r{at}", tokens, target) for at, (tokens, target) in enumerate(drawn)]
    now = MoveModes("adaptive", 0.5).divide(wanted_moves, reports, 0.0)
    size = {wanted.order.ref: wanted.tokens for wanted in wanted_moves}
    assert len({order.ref for order in now}) == len(now) and {order.ref for order in now} <= size.keys()
    for target in "bc":
        mine = [order for order in now if order.target == target]
        tokens = [size[order.ref] for order in mine if order.mode is TOKENS]
        assert sum(tokens) <= 5000 or len(mine) == 1
    assert not drawn or now


def test_prefill_tokens_exclude_waiting_prompts() -> None:
    listed = sequence_report(
        ref(), SequenceState.PREFILLING, prompt_tokens=300, computed_tokens=100, allocated_blocks=7
    )
    report = worker_report(sequences=(listed,), prefill_tokens_per_s=1000.0, busy_share=0.5)
    assert computable_tokens(report, 1.0) == 300


WORKERS = ("a", "b", "c")


def test_a_full_budget_sends_moves_the_other_way_and_then_to_the_next_epoch() -> None:
    budgets = {("a", "b"): 1000}, {"b": 100}
    sizes = {"large": (600, 90), "middle": (500, 70), "small": (450, 60)}
    moves = [Migration(name, "a", "b", *size) for name, size in sizes.items()]
    assert divide(moves, *budgets) == {"large": KV, "middle": TOKENS, "small": None}


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
def test_no_boundary_is_exceeded_and_the_order_of_the_moves_does_not_matter(
    asked: list[Migration], links: dict[tuple[str, str], int], workers: dict[str, int], dice: Any
) -> None:
    modes = divide(asked, links, workers)
    assert modes.keys() == {one.name for one in asked}
    for way in {(one.source, one.target) for one in asked}:
        sent = [one for one in asked if (one.source, one.target) == way and modes[one.name] is KV]
        assert sum(one.kv_bytes for one in sent) <= links.get(way, 0)
    for target in WORKERS:
        sent = [one for one in asked if one.target == target and modes[one.name] is TOKENS]
        assert sum(one.tokens for one in sent) <= workers.get(target, 0)
    dice.shuffle(asked)
    assert divide(asked, links, workers) == modes
