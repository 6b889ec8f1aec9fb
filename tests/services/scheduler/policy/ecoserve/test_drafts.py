"""Batches of the family: chunks, texts, steps ahead."""

import pytest

from services.scheduler.policy.contract import PlannedBatch, PolicyFactory, PolicySettings, Task, WorkerShape
from services.scheduler.policy.ecoserve.planner import EcoServe, EcoServeD, EcoServeProfile
from services.scheduler.policy.kvasir import KvasirPolicy
from tests.services.scheduler.policy.batch_rig import BLOCK_TOKENS, predicted, rig, truth

every = pytest.mark.parametrize("make_policy", [EcoServeD, EcoServe, EcoServeProfile, KvasirPolicy])


def prefills(batch: PlannedBatch) -> list[tuple[str, int, int]]:
    return [(item.key[0], item.first_token, item.end_token) for item in batch.prefills]


@every
def test_plans_reach_ahead_while_nothing_waits(make_policy: PolicyFactory) -> None:
    bench = rig(make_policy, PolicySettings(max_steps=8, options={"pad": 0.0}), blocks=64, lag=0)
    bench.predict = truth
    bench.arrive("a", 10, 60, 60)
    for _ in range(3):
        bench.turn()
    assert [batch.steps for batch in bench.batches][-1] == 8
    bench.arrive("b", 10, 30, 30)
    bench.turn()
    assert bench.batches[-1].steps == 1 and prefills(bench.batches[-1]) == [("b", 0, 10)]
    bench.finish()


@every
def test_no_plan_reaches_beyond_what_was_set_aside(make_policy: PolicyFactory) -> None:
    """Predicted to end after 11: the batch that gets there is cut, and the next one asks."""
    bench = rig(make_policy, PolicySettings(max_steps=8, options={"pad": 0.0}), blocks=8, lag=0)
    bench.predict = lambda job, generated: predicted(11)
    bench.arrive("a", 4, 25, 28)
    bench.finish()
    steps = [batch.steps for batch in bench.batches]
    assert max(steps) == 8 and sum(steps) < len(steps) * 8


@every
def test_without_chunks_prompts_go_whole_even_one_beyond_the_budget(make_policy: PolicyFactory) -> None:
    bench = rig(make_policy, PolicySettings(token_budget=64, chunked_prefill=False), blocks=64, lag=0)
    bench.predict = truth
    bench.arrive("a", 80, 5, 5)
    bench.arrive("b", 40, 5, 5)
    bench.turn()
    assert len(bench.batches[0].prefills) == 1
    bench.finish()
    assert all(item.first_token == 0 for batch in bench.batches for item in batch.prefills)


@every
def test_a_plan_carries_no_more_text_than_allowed(make_policy: PolicyFactory) -> None:
    bench = rig(make_policy, PolicySettings(start_tokens=25), blocks=64, lag=0)
    for name in ("a", "b", "c"):
        bench.arrive(name, 10, 5, 5)
    bench.turn()
    assert len(bench.batches[0].prefills) == 2
    bench.finish()


@every
def test_one_prompt_at_most_is_partly_prefilled(make_policy: PolicyFactory) -> None:
    bench = rig(make_policy, PolicySettings(token_budget=16), blocks=64, lag=0)
    for name in ("a", "b", "c"):
        bench.arrive(name, 40, 5, 5)
    while bench.unfinished:
        bench.turn()
        assert sum(0 < job.computed < job.total for job in bench.jobs.values() if not job.decoding) <= 1


@every
def test_a_policy_ignores_events_of_unknown_keys(make_policy: PolicyFactory) -> None:
    policy = make_policy(WorkerShape(BLOCK_TOKENS, 8), PolicySettings())
    policy.on_predicted(("a", 0), predicted(3), 0.0)
    policy.on_short(("a", 0), 1, 0.0)
    policy.on_arrival(Task(("b", 0), 4, 1, 0.0), 0.0)
    policy.on_short(("b", 0), 1, 0.0)
    policy.check_integrity()
