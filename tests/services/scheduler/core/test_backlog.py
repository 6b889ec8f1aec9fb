"""The backlog: first come, first served; one open question at a time."""

import pytest

from services.scheduler.core.backlog import Backlog
from services.scheduler.core.rules import Rules
from services.scheduler.policy.contract import QueueRule, by_work
from shared.messages.commands import LengthPrediction
from tests.services.scheduler.core.builders import sequence
from tests.shared.messages.builders import worker_report

RULES = Rules(placement_batch=2, placement_interval_s=0.05)


def test_the_oldest_are_asked_about_first() -> None:
    backlog = Backlog(RULES)
    for name, arrival_s in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        backlog.add(sequence(name, arrival_s, generated=1))
        backlog.check_integrity()
    question = backlog.ask(("worker-1",), 5.0)
    assert question is not None and question.excluded_workers == ("worker-1",)
    assert [(item.ref.request_id, item.size_tokens, item.limit_tokens) for item in question.items] == [
        ("a", 5, 24),
        ("b", 5, 24),
    ]


def test_one_question_is_open_at_a_time_and_the_next_waits_for_the_interval() -> None:
    backlog = Backlog(RULES)
    backlog.add(sequence("a", 0.0, generated=1))
    question = backlog.ask((), 1.0)
    assert question is not None and backlog.ask((), 9.0) is None
    assert [ref.request_id for ref in backlog.close(question.question, more=False, now_s=9.0)] == ["a"]
    assert backlog.ask((), 9.04) is None
    assert backlog.ask((), 9.06) is not None


def test_a_change_while_the_question_is_open_makes_the_next_one_due_at_once() -> None:
    backlog = Backlog(RULES)
    backlog.add(sequence("a", 0.0, generated=1))
    question = backlog.ask((), 1.0)
    assert question is not None
    backlog.poke()
    backlog.close(question.question, more=False, now_s=1.0)
    assert backlog.ask((), 1.0) is not None


def test_an_answer_to_another_question_says_nothing() -> None:
    backlog = Backlog(RULES)
    backlog.add(sequence("a", 0.0, generated=1))
    question = backlog.ask((), 1.0)
    assert question is not None
    assert backlog.close(question.question + 1, more=True, now_s=1.0) == ()
    assert backlog.close(question.question, more=True, now_s=1.0) != ()
    assert backlog.close(question.question, more=True, now_s=1.0) == ()


def test_only_what_waits_can_leave() -> None:
    backlog = Backlog(RULES)
    first, second = sequence("a", 0.0, generated=1), sequence("b", 0.0, generated=1)
    backlog.add(first)
    assert first in backlog and second not in backlog
    with pytest.raises(ValueError, match="b/0#1"):
        backlog.remove(second)
    backlog.remove(first)
    assert len(backlog) == 0 and backlog.ask((), 1.0) is None


def _told(tokens: int) -> LengthPrediction:
    return LengthPrediction(
        rl_tokens=tokens,
        p50_tokens=tokens,
        p80_tokens=tokens,
        p90_tokens=tokens,
        p95_tokens=tokens,
        model_version="test",
    )


def _starts(passing_share: float) -> list[str]:
    """Three long answers, then sixty short ones, one by one."""
    backlog = Backlog(Rules(placement_batch=1), QueueRule(by_work, passing_share))
    backlog.on_reported(worker_report(prefill_tokens_per_s=1e9, decode_step_s=1.0))
    names = [*(f"long-{n}" for n in range(3)), *(f"short-{n:02}" for n in range(60))]
    waiting = [sequence(name, float(at), generated=1) for at, name in enumerate(names)]
    for one in waiting:
        backlog.add(one)
        backlog.on_predicted(one.key, _told(8 if one.ref.request_id.startswith("long") else 3))
    by_ref = {one.ref: one for one in waiting}
    order = []
    while len(backlog):
        question = backlog.ask((), 100.0)
        assert question is not None
        (ref,) = backlog.close(question.question, more=True, now_s=100.0)
        backlog.start(by_ref[ref])
        order.append(ref.request_id)
    return order


def test_as_much_passes_as_the_policys_option_says() -> None:
    few, many = _starts(0.0), _starts(0.9)
    assert few.index("long-2") < 30 < many.index("long-2"), (few, many)
