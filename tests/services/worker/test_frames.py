"""One frame per gateway, with the new part of each answer."""

from services.worker.frames import AddressedFrame, assemble, fetched, without_ends
from services.worker.state import HeldSequence
from shared.messages.sequence import FinishReason
from tests.services.worker.builders import ref, spec


def held(name: str, answer: list[int], gateway_id: str = "gateway-0") -> HeldSequence:
    source = spec(ref(name), [1, 2, 3], generated=answer, gateway_id=gateway_id)
    return HeldSequence.from_spec(source, 64, now_s=0.0)


def frames() -> tuple[AddressedFrame, ...]:
    ended = held("b", [7], gateway_id="gateway-1")
    ended.finish_reason = FinishReason.STOP
    changed = [(held("a", [5, 6]), 1), (ended, 0), (held("c", [8, 9, 10]), 0)]
    return assemble("worker-0", 42, changed)


def test_deltas_are_grouped_by_gateway() -> None:
    first, second = frames()
    assert (first.gateway_id, second.gateway_id) == ("gateway-0", "gateway-1")
    assert [(d.request_id, d.first_index, d.tokens) for d in first.frame.deltas] == [
        ("a", 1, (6,)),
        ("c", 0, (8, 9, 10)),
    ]
    assert (first.frame.worker_id, first.frame.incarnation) == ("worker-0", 42)
    assert second.frame.deltas[0].finish_reason is FinishReason.STOP


def test_frames_with_an_end_can_be_left_out() -> None:
    assert [frame.ends for frame in frames()] == [0, 1]
    assert [frame.gateway_id for frame in without_ends(frames())] == ["gateway-0"]


def test_a_fetch_is_answered_from_the_index_asked_for() -> None:
    sequence = held("a", [5, 6, 7])
    for first_index, expected in (
        (0, (0, (5, 6, 7))),
        (2, (2, (7,))),
        (3, (3, ())),
        (9, (3, ())),
        (-1, (0, (5, 6, 7))),
    ):
        delta = fetched(sequence, first_index).delta
        assert delta is not None and (delta.first_index, delta.tokens) == expected
    assert fetched(None, 0).delta is None
