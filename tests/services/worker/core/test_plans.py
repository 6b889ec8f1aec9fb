"""Which plan runs next; frames with the new part of each answer, one per gateway; how fast a worker is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.core.frames import MOST_LOGPROBS, assemble, delta_from, fetched
from services.worker.core.plans import MAX_PLANS, PlanQueue
from services.worker.core.reports import WEIGHT, SpeedMeter
from services.worker.core.sampling import Sampled
from services.worker.core.sequence import HeldSequence
from shared.messages.base import encode
from shared.messages.plans import StepOutcome
from shared.messages.sequence import FinishReason
from shared.messages.tokens import TokenLogprobs
from tests.shared.messages.builders import plan, ref, spec

EXPIRED, STALE, SUPERSEDED = StepOutcome.EXPIRED, StepOutcome.STALE_EPOCH, StepOutcome.SUPERSEDED


def seqs_in_order(queue: PlanQueue, now_s: float = 0.0) -> list[int]:
    seqs = []
    while (head := queue.head(now_s)[0]) is not None:
        seqs.append(head.plan.seq)
        queue.finish_head()
    return seqs


def test_an_epoch_far_beyond_the_one_obeyed_is_ignored() -> None:
    """Keeps one plan with an epoch of 2^62 from making a worker refuse all schedulers to come."""
    queue = PlanQueue()
    assert queue.offer(plan(1, epoch=7), 0.0) == []
    assert queue.offer(plan(1, epoch=2**62), 0.0) == []
    assert queue.epoch == 7 and len(queue) == 1
    assert not queue.may_follow(2**62) and queue.may_follow(10**9)
    assert PlanQueue().may_follow(2**62), "a worker that has just started knows no epoch"


@pytest.mark.parametrize(
    ("offers", "given_up", "epoch", "run"),
    [
        pytest.param([(1, 1), (1, 2), (1, 3)], [], 1, [1, 2, 3], id="in order"),
        pytest.param([(1, 1), (1, 1), (1, 2), (1, 2)], [], 1, [1, 2], id="twice"),
        pytest.param([(1, 1), (1, 3)], [(1, 2, EXPIRED)], 1, [1, 3], id="one is lost"),
        pytest.param([(1, 1), (1, 2), (1, 1)], [(1, 1, SUPERSEDED), (1, 2, SUPERSEDED)], 1, [1], id="anew"),
        pytest.param([(5, 1), (4, 2)], [(4, 2, STALE)], 5, [1], id="an older epoch is refused"),
        pytest.param([(5, 1), (6, 1)], [(5, 1, STALE)], 6, [1], id="a higher epoch replaces what waits"),
    ],
)
def test_which_plans_run_and_what_is_said_of_the_others(
    offers: list[tuple[int, int]], given_up: list[tuple[int, int, StepOutcome]], epoch: int, run: list[int]
) -> None:
    """Plans as (epoch, number)."""
    queue = PlanQueue()
    told = [up for epoch, seq in offers for up in queue.offer(plan(seq, epoch=epoch), 0.0)]
    assert [(up.epoch, up.seq, up.outcome) for up in told] == given_up
    assert all(up.steps_done == 0 for up in told)
    assert queue.epoch == epoch and seqs_in_order(queue) == run


def test_a_plan_that_expires_or_is_superseded_halfway_is_given_up() -> None:
    queue = PlanQueue()
    queue.offer(plan(1, steps=4, valid_for_s=2.0), 10.0)
    queue.offer(plan(2, steps=9, valid_for_s=9.0), 10.0)
    queue.offer(plan(3), 10.0)
    head, _ = queue.head(12.0)
    assert head is not None and head.plan.seq == 1
    head.steps_done = 1
    following, expired = queue.head(12.5)
    assert [(up.seq, up.steps_done, up.outcome) for up in expired] == [(1, 1, EXPIRED)]
    assert following is not None and following.plan.seq == 2
    following.steps_done = 3
    given_up = queue.offer(plan(4, supersedes=True), 13.0)
    assert [(up.seq, up.steps_done, up.outcome) for up in given_up] == [
        (2, 3, SUPERSEDED),
        (3, 0, SUPERSEDED),
    ]
    assert seqs_in_order(queue, 13.0) == [4]


def test_the_queue_is_bounded() -> None:
    queue = PlanQueue()
    given_up = [queue.offer(plan(seq), 0.0) for seq in range(1, MAX_PLANS + 3)]
    assert [up.seq for ups in given_up for up in ups] == [MAX_PLANS + 1, MAX_PLANS + 2]
    queue.check_integrity()


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.booleans(), st.floats(0, 3)),
        max_size=40,
    ),
    st.lists(st.sampled_from(["step", "reset", "nothing"]), max_size=40),
)
def test_every_plan_is_run_or_given_up_or_ignored_once(
    offers: list[tuple[int, int, int, bool, float]], actions: list[str]
) -> None:
    queue = PlanQueue()
    now_s = 0.0
    epoch = 0
    for index, (plan_epoch, seq, steps, supersedes, wait_s) in enumerate(offers):
        now_s += wait_s
        offered = plan(seq, epoch=plan_epoch, steps=steps, supersedes=supersedes)
        waiting = len(queue)
        given_up = queue.offer(offered, now_s)
        queue.check_integrity()
        assert queue.epoch >= epoch
        epoch = queue.epoch
        assert all(up.outcome is not StepOutcome.RAN for up in given_up)
        assert len(queue) <= waiting + 1
        if plan_epoch < epoch:
            assert len(queue) == waiting and given_up[0].outcome is StepOutcome.STALE_EPOCH
        action = actions[index % len(actions)] if actions else "nothing"
        if action == "step":
            head, _ = queue.head(now_s)
            if head is not None:
                assert now_s - head.received_s <= head.plan.valid_for_s
                head.steps_done += 1
                if head.over:
                    queue.finish_head()
        elif action == "reset":
            queue.reset(epoch)
            assert len(queue) == 0 and queue.last_seq == 0
        queue.check_integrity()


def test_later_measurements_count_by_weight_and_prefill_is_measured_without_the_share_of_decodes() -> None:
    meter = SpeedMeter()
    meter.on_step(prefilled_tokens=3, decoded_tokens=0, step_s=0.010)
    meter.on_step(prefilled_tokens=0, decoded_tokens=0, step_s=0.010)
    assert (meter.prefill_tokens_per_s, meter.decode_step_s) == (0.0, 0.0), "a few tokens say nothing"
    meter.on_step(prefilled_tokens=0, decoded_tokens=4, step_s=0.010)
    assert meter.decode_step_s == 0.010
    meter.on_step(prefilled_tokens=100, decoded_tokens=4, step_s=0.060)
    assert meter.prefill_tokens_per_s == pytest.approx(100 / 0.050)
    meter.on_step(prefilled_tokens=0, decoded_tokens=4, step_s=0.020)
    assert meter.decode_step_s == pytest.approx(0.010 + WEIGHT * 0.010)
    profiled = SpeedMeter(1000.0)
    profiled.on_step(prefilled_tokens=100, decoded_tokens=0, step_s=0.05)
    assert profiled.prefill_tokens_per_s == pytest.approx(1000 + WEIGHT * 1000)


def held(name: str, answer: list[int], gateway_id: str = "gateway-0") -> HeldSequence:
    source = spec(ref(name), [1, 2, 3], generated=answer, gateway_id=gateway_id)
    return HeldSequence.from_spec(source, 64, now_s=0.0)


def test_deltas_are_grouped_by_gateway() -> None:
    ended = held("b", [7], gateway_id="gateway-1")
    ended.finish_reason = FinishReason.STOP
    changed = [(held("a", [5, 6]), 1), (ended, 0), (held("c", [8, 9, 10]), 0)]
    first, second = assemble("worker-0", 42, changed)
    assert (first.gateway_id, second.gateway_id) == ("gateway-0", "gateway-1")
    deltas = [(d.request_id, d.first_index, d.tokens) for d in first.frame.deltas]
    assert deltas == [("a", 1, (6,)), ("c", 0, (8, 9, 10))]
    assert (first.frame.worker_id, first.frame.incarnation) == ("worker-0", 42)
    assert second.frame.deltas[0].finish_reason is FinishReason.STOP


def test_a_fetch_is_answered_from_the_index_asked_for() -> None:
    sequence = held("a", [5, 6, 7])
    for asked, first, tokens in ((0, 0, (5, 6, 7)), (2, 2, (7,)), (3, 3, ()), (9, 3, ()), (-1, 0, (5, 6, 7))):
        delta = fetched(sequence, asked).delta
        assert delta is not None and (delta.first_index, delta.tokens) == (first, tokens)
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
