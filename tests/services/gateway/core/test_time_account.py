"""The account of a request covers its time without gaps and gives each moment to the first in rank."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.time_account import (
    RANK,
    UNEXPLAINED,
    AnswerAccount,
    Cause,
    Happened,
    account_of,
    sweep,
)

times = st.integers(0, 40).map(float)
claims = st.lists(st.tuples(times, times, st.sampled_from(list(Cause))), max_size=12)


@given(claims, times, st.integers(1, 40))
def test_every_moment_goes_to_the_first_in_rank_that_claims_it(
    made: list[tuple[float, float, Cause]], begin_s: float, length: int
) -> None:
    end_s = begin_s + length
    parts = sweep(made, begin_s, end_s)
    assert (parts[0].begin_s, parts[-1].end_s) == (begin_s, end_s)
    for before, after in pairwise(parts):
        assert before.end_s == after.begin_s and before.cause != after.cause
    for tick in range(length):
        middle = begin_s + tick + 0.5
        ranked = sorted((RANK[cause], str(cause)) for first, last, cause in made if first < middle < last)
        got = next(part.cause for part in parts if part.begin_s < middle < part.end_s)
        assert got == (ranked[0][1] if ranked else UNEXPLAINED)


def event(at_s: float, service: str, kind: str, **fields: Any) -> Happened:
    return Happened(at_s, service, f"{service}-0", kind, {"attempt": 1, **fields}, "req_1")


def step(at_s: float, step_s: float, *, busy_s: float, plan: int, is_prefill: bool = False) -> Happened:
    own = {"chunks": [(0, 1, 0, 8)], "own": []} if is_prefill else {"chunks": [], "own": [(0, 1)]}
    numbers = {"prefills": int(is_prefill), "decodes": 3, "epoch": 1, "plan": plan, "heard_at_s": at_s - 0.01}
    return event(at_s, "worker", "step", step_s=step_s, busy_s=busy_s, **own, **numbers)


def accounted(story: list[Happened]) -> AnswerAccount:
    account = account_of(story, now_s=99.0)
    assert account is not None
    return account


def ended(at_s: float, took_s: float, tokens: int = 3) -> list[Happened]:
    """The last token at `at_s`, and the end of the request at once."""
    complete = event(at_s, "gateway", "tokens complete", phase="ended", reason="stop", tokens=tokens)
    return [complete, event(at_s, "gateway", "request", took_s=took_s, status=200, client_gone=False)]


def test_a_story_is_told_in_its_parts() -> None:
    """Read for 0.1 s, queued for 1 s, at the worker for 0.5 s, computed; others' steps for 0.3 s in between;
    and a client that takes 2 s to read."""
    story = [
        event(10.1, "gateway", "submit", causes={}),
        event(10.1, "scheduler", "submitted", known=False, queued=4, prompt_tokens=8, max_tokens=9),
        event(11.1, "scheduler", "placed", worker="worker-0"),
        event(11.6, "scheduler", "plan", worker="worker-0", epoch=1, plan=5, chunks=[(0, 1, 0, 8)], own=[]),
        event(11.6, "scheduler", "started", worker="worker-0", plan=5),
        step(11.7, 0.2, busy_s=50.0, plan=5, is_prefill=True),
        step(12.2, 0.1, busy_s=50.5, plan=6),
        event(12.31, "gateway", "tokens complete", phase="ended", reason="stop", tokens=2),
        event(14.3, "gateway", "reader slow", for_s=1.9),
        event(14.4, "gateway", "request", took_s=4.4, status=200, client_gone=False),
    ]
    account = accounted(list(reversed(story)))
    spent = account.seconds()
    expected = {
        Cause.READER: 1.9,
        Cause.QUEUED: 1.0,
        Cause.AT_WORKER: 0.5,
        Cause.OTHERS: 0.3,
        Cause.PREFILL: 0.2,
        Cause.DECODE: 0.1,
        Cause.READ: 0.1,
    }
    for cause, length_s in expected.items():
        assert spent[cause] == pytest.approx(length_s, abs=0.1), cause
    assert next(iter(spent)) == Cause.READER and account.accounted_share == pytest.approx(1.0)
    assert sum(spent.values()) == pytest.approx(4.4)


def test_one_that_was_put_off_and_begins_under_a_later_plan_is_at_its_worker_meanwhile() -> None:
    story = [
        event(10.0, "gateway", "submit", causes={}),
        event(10.0, "scheduler", "submitted", known=False, queued=1, prompt_tokens=8, max_tokens=9),
        event(10.0, "scheduler", "placed", worker="worker-0"),
        event(10.0, "scheduler", "plan", worker="worker-0", epoch=1, plan=5, chunks=[(0, 1, 0, 8)], own=[]),
        step(11.0, 0.2, busy_s=50.0, plan=9, is_prefill=True),
        *ended(11.2, 1.2),
    ]
    account = accounted(story)
    assert account.seconds()[Cause.BETWEEN] == pytest.approx(1.0)
    assert account.accounted_share == pytest.approx(1.0)


def test_a_step_that_a_frozen_worker_ends_too_late_is_its_loss() -> None:
    """It froze in its second step, the request went on elsewhere after 3 s, then it was let go on: its own
    record says that the step took 6 s, and a third one followed. Nobody waited for either."""
    lost = {"attempt": 2, "causes": {"worker_lost": 1}}
    again = step(13.3, 0.1, busy_s=9.0, plan=3)
    again.fields["own"] = [(0, 2)]
    story = [
        event(10.0, "gateway", "submit", causes={}),
        step(10.1, 0.1, busy_s=0.0, plan=1, is_prefill=True),
        step(10.3, 6.0, busy_s=0.1, plan=2),
        event(13.2, "gateway", "submit", **lost),
        replace(again, instance="worker-1"),
        step(16.4, 0.1, busy_s=6.1, plan=3),
        *ended(13.4, 3.4),
    ]
    account = accounted(story)
    spent = account.seconds()
    assert next(iter(spent)) == Cause.LOST and spent[Cause.LOST] == pytest.approx(13.2 - 10.2)
    assert spent[Cause.DECODE] == pytest.approx(0.1) and account.facts["steps"] == 2


def test_an_attempt_that_was_submitted_again_is_not_the_last_one() -> None:
    """A frozen worker's request is first asked about again, under the same attempt. That hid what came later
    behind steps of a worker that is gone."""
    second = {"attempt": 2, "causes": {"silent": 1}}
    plan = {"worker": "worker-1", "epoch": 1, "chunks": []}
    later = [replace(step(a, 0.1, busy_s=a, plan=n), instance="worker-1") for a, n in ((16.1, 1), (19.0, 2))]
    for each in later:
        each.fields["own"] = [(0, 2)]
    story = [
        event(10.0, "gateway", "submit", causes={}),
        event(10.1, "scheduler", "plan", **{**plan, "worker": "worker-0"}, plan=7, own=[(0, 1)]),
        event(13.0, "gateway", "submit", causes={}),
        event(16.0, "gateway", "submit", **second),
        event(16.1, "scheduler", "plan", **plan, plan=1, own=[(0, 2)]),
        *later,
        *ended(19.2, 9.2),
    ]
    account = accounted(story)
    spent = account.seconds()
    assert spent[Cause.LOST] == pytest.approx(16.0 - 10.1)
    assert spent.get(Cause.FORGOTTEN, 0.0) == pytest.approx(0.0)
    assert spent[Cause.OTHERS] + spent.get(Cause.NO_PLAN, 0.0) == pytest.approx(2.8)


def test_a_source_that_goes_on_during_a_move_computes_the_answer() -> None:
    moved = {"attempt": 2, "causes": {"moved": 1}}
    story = [
        event(10.0, "gateway", "submit", causes={}),
        step(10.1, 0.1, busy_s=0.0, plan=1, is_prefill=True),
        event(10.2, "gateway", "submit", **moved),
        step(10.2, 0.5, busy_s=0.1, plan=2),
        *ended(10.7, 0.7),
    ]
    account = accounted(story)
    assert account.seconds()[Cause.DECODE] == pytest.approx(0.5)


def test_a_source_that_freezes_during_a_move_computes_nothing_of_what_the_target_says() -> None:
    """Its one step, which ends when it is let go on, hid all that happened at the target."""
    moved = {"attempt": 2, "causes": {"moved": 1}}
    target = replace(step(13.0, 0.1, busy_s=0.0, plan=1), instance="worker-1")
    target.fields["own"] = [(0, 2)]
    story = [
        event(10.0, "gateway", "submit", causes={}),
        step(10.1, 0.1, busy_s=0.0, plan=1, is_prefill=True),
        event(10.2, "gateway", "submit", **moved),
        step(10.3, 9.0, busy_s=0.1, plan=2),
        target,
        *ended(13.2, 3.2),
    ]
    account = accounted(story)
    spent = account.seconds()
    assert spent[Cause.DECODE] == pytest.approx(0.1) and spent[Cause.MOVING] == pytest.approx(13.0 - 10.2)
    assert account.facts["workers"] == ["worker-0", "worker-1"] and account.facts["steps"] == 2


def test_what_a_step_waits_for_other_workers_is_not_computing() -> None:
    slow = step(10.0, 1.0, busy_s=0.0, plan=1)
    slow.fields["remote_s"] = 0.75
    account = accounted([event(9.5, "gateway", "submit", causes={}), slow, *ended(11.5, 2.0)])
    spent = account.seconds()
    assert spent[Cause.LENDERS] == pytest.approx(0.75) and spent[Cause.DECODE] == pytest.approx(0.25)
    assert account.facts["remote_steps"] == 1
