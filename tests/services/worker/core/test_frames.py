"""One frame per gateway, with the new part of each answer."""

from services.worker.core.frames import MOST_LOGPROBS, AddressedFrame, assemble, delta_from, fetched
from services.worker.core.sampling import Sampled
from services.worker.core.sequence import HeldSequence
from shared.messages.base import encode
from shared.messages.sequence import FinishReason
from shared.messages.tokens import TokenLogprobs
from tests.shared.messages.builders import ref, spec


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


def measured(answer: list[int], fresh: list[int], top: int = 0) -> HeldSequence:
    """Resumed with `answer`; `fresh` tokens were sampled here and have log-probabilities."""
    source = spec(ref(), [1, 2, 3], generated=answer, top_logprobs=top, max_tokens=10**6)
    sequence = HeldSequence.from_spec(source, 10**6, now_s=0.0)
    for token in fresh:
        alternatives = tuple((100_000 + rank, -1.0 - rank) for rank in range(top))
        sequence.append(Sampled(token, TokenLogprobs(-float(token), alternatives)))
    sequence.check_integrity()
    return sequence


def test_tokens_of_an_earlier_attempt_come_alone_and_without_logprobs() -> None:
    sequence = measured([5, 6], [7, 8])
    sequence.finish_reason = FinishReason.LENGTH
    earlier, fresh = delta_from(sequence, 1), delta_from(sequence, 2)
    assert (earlier.tokens, earlier.logprobs, earlier.finish_reason) == ((6,), (), None)
    assert (fresh.tokens, [each.chosen for each in fresh.logprobs]) == ((7, 8), [-7, -8])
    assert fresh.finish_reason is FinishReason.LENGTH


def test_a_long_answer_with_logprobs_is_fetched_in_parts() -> None:
    top, tokens = 20, list(range(4000))
    sequence = measured([], tokens, top)
    sequence.finish_reason = FinishReason.LENGTH
    held: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finished = []
    while len(held) < len(tokens):
        answer = fetched(sequence, len(held))
        assert answer.delta is not None and answer.delta.first_index == len(held)
        assert len(encode(answer)) < 16 * MOST_LOGPROBS
        held += answer.delta.tokens
        logprobs += answer.delta.logprobs
        finished.append(answer.delta.finish_reason)
    assert held == tokens and logprobs == sequence.logprobs
    assert finished == [None, FinishReason.LENGTH]


def test_the_proof_goes_with_the_first_tokens_and_with_what_is_fetched_and_reported() -> None:
    sequence = held("a", [5])
    sequence.proof = b"proof"
    (first,), (second,) = (assemble("worker-0", 42, [(sequence, 0)]) for _ in range(2))
    assert [each.frame.deltas[0].proof for each in (first, second)] == [b"proof", b""]
    answer = fetched(sequence, 1).delta
    assert answer is not None and answer.proof == b"proof"
    assert sequence.report(0.0).proof == b"proof"
