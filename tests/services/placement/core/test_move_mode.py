"""By KV or by tokens: whichever is cheaper by what was measured, as far as there is room for it."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from services.placement.core.move_mode import Carrier, ModeChoice, Ways, Wish
from shared.messages.moves import MoveMode, SequenceMove
from shared.messages.reports import SequenceReport, SequenceState
from shared.messages.sequence import SequenceRef
from tests.shared.messages.builders import worker_report


def carrier(**changes: object) -> Carrier:
    usual: dict[str, object] = {
        "block_tokens": 16,
        "block_bytes": 1000,
        "fingerprint": b"same",
        "link_bytes_per_s": {"a": 1e6, "b": 1e6},
        "prefill_tokens_per_s": 10_000.0,
    }
    return Carrier(**(usual | changes))  # type: ignore[arg-type]


def wish(name: str, tokens: int = 160, target: str = "b") -> Wish:
    ref = SequenceRef(request_id=name, choice=0, attempt=1)
    return Wish(SequenceMove(ref=ref, target=target), "a", tokens)


def modes(carriers: Mapping[str, Carrier], *wishes: Wish, choice: ModeChoice = "adaptive") -> list[MoveMode]:
    now, _ = Ways(choice, 0.5).divide(wishes, carriers, 0.0)
    return [order.mode for order in now]


def test_a_fast_link_carries_kv_and_a_slow_one_tokens() -> None:
    assert modes({"a": carrier(), "b": carrier()}, wish("one")) == [MoveMode.KV]
    slow = carrier(link_bytes_per_s={"a": 30_000.0})
    assert modes({"a": carrier(), "b": slow}, wish("one")) == [MoveMode.TOKENS]


def test_a_busy_target_is_sent_kv() -> None:
    slowish = {"link_bytes_per_s": {"a": 400_000.0}}
    assert modes({"a": carrier(), "b": carrier(**slowish)}, wish("one")) == [MoveMode.TOKENS]
    busy = carrier(busy_share=0.99, **slowish)
    assert modes({"a": carrier(), "b": busy}, wish("one")) == [MoveMode.KV]
    crowded = carrier(waiting_tokens=4900, **slowish)
    assert modes({"a": carrier(), "b": crowded}, wish("one")) == [MoveMode.KV]


def test_workers_of_different_kv_and_unmeasured_ones_get_tokens() -> None:
    assert modes({"a": carrier(), "b": carrier(fingerprint=b"other")}, wish("one")) == [MoveMode.TOKENS]
    assert modes({"a": Carrier(), "b": Carrier()}, wish("one")) == [MoveMode.TOKENS]
    assert modes({}, wish("one")) == [MoveMode.TOKENS]


def test_a_choice_is_obeyed() -> None:
    both = {"a": carrier(), "b": carrier()}
    assert modes(both, wish("one"), choice="tokens") == [MoveMode.TOKENS]
    assert modes(both, wish("one"), choice="kv") == [MoveMode.KV]


def test_what_is_under_way_takes_its_room_until_it_is_over() -> None:
    tight = {"a": carrier(), "b": carrier(link_bytes_per_s={"a": 24_000.0}, prefill_tokens_per_s=400.0)}
    ways = Ways("adaptive", 0.5)
    first, _ = ways.divide([wish("one")], tight, 0.0)
    second, later = ways.divide([wish("two")], tight, 0.1)
    assert len(first) == 1 and [order.mode for order in second + first] and len(second) + len(later) == 1
    third, waits = ways.divide([wish("three")], tight, 0.2)
    assert not third and len(waits) == 1
    for order in (*first, *second):
        ways.on_over(order.ref)
    assert len(ways.divide([wish("three")], tight, 0.3)[0]) == 1


def test_one_too_large_for_any_epoch_goes_when_nothing_else_does() -> None:
    narrow = {"a": carrier(), "b": carrier(link_bytes_per_s={"a": 10.0}, prefill_tokens_per_s=10.0)}
    assert len(modes(narrow, wish("huge", tokens=100_000))) == 1


@given(st.lists(st.tuples(st.integers(1, 5000), st.sampled_from("bc")), max_size=12))
def test_each_wish_goes_now_or_later_and_boundaries_hold(drawn: list[tuple[int, str]]) -> None:
    carriers = {"a": carrier(), "b": carrier(), "c": carrier()}
    wishes = [wish(f"r{at}", tokens, target) for at, (tokens, target) in enumerate(drawn)]
    now, later = Ways("adaptive", 0.5).divide(wishes, carriers, 0.0)
    assert {order.ref for order in (*now, *later)} == {wish.order.ref for wish in wishes}
    assert len(now) + len(later) == len(wishes)
    size = {wish.order.ref: wish.tokens for wish in wishes}
    for target in "bc":
        mine = [order for order in now if order.target == target]
        tokens = [size[order.ref] for order in mine if order.mode is MoveMode.TOKENS]
        assert sum(tokens) <= 5000 or len(mine) == 1
    assert not drawn or now


def test_what_a_heartbeat_says() -> None:
    listed = SequenceReport(
        ref=SequenceRef(request_id="r", choice=0, attempt=1),
        gateway_id="g",
        state=SequenceState.PREFILLING,
        prompt_tokens=300,
        generated_tokens=0,
        computed_tokens=100,
        max_tokens=10,
        allocated_blocks=7,
    )
    report = worker_report(sequences=(listed,), prefill_tokens_per_s=1000.0, busy_share=0.5)
    made = Carrier.of(report)
    assert made.waiting_tokens == 200 and made.prefill_tokens(1.0) == 300
