"""`ecoserve_profile`: who ends early runs beside who needs the blocks later, and nothing is set aside."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy.contract import PolicySettings
from services.scheduler.policy.research.ecoserve.planner import EcoServeProfile, EcoServeSDO
from tests.services.scheduler.policy.batch_rig import (
    BatchRig,
    Jobs,
    guesses_of,
    in_turn,
    jobs_of,
    play,
    rig,
    settings_of,
    truth,
)
from tests.shared.messages.builders import predicted

EXACT = PolicySettings(max_steps=1, options={"pad": 0.0, "reserve_ratio": 0.0})


def batches_of(make_policy: type[EcoServeProfile] | type[EcoServeSDO]) -> int:
    """One long answer and short ones in little memory: how many batches it takes."""
    bench = rig(make_policy, EXACT, blocks=70, lag=0)
    bench.predict = truth
    play(bench, [(4, 240, 240, 3), *[(4, 60, 60, 0)] * 6])
    assert not any(batch.preemptions or batch.questions for batch in bench.batches)
    return len(bench.batches)


def test_the_profile_lets_more_run_at_once_than_exact_allocation() -> None:
    assert batches_of(EcoServeProfile) < 0.75 * batches_of(EcoServeSDO)


def test_an_answer_longer_than_predicted_goes_on_where_the_profile_allows_it() -> None:
    bench = rig(EcoServeProfile, EXACT, blocks=70, lag=0)
    bench.predict = lambda job, generated: predicted(10)
    play(bench, [(4, 100, 120, 0)])
    assert any(batch.questions for batch in bench.batches)
    assert len(bench.batches) == 100, "it never stopped"


def check_nothing_set_aside(bench: BatchRig) -> None:
    policy = bench.policy
    assert isinstance(policy, EcoServeProfile)
    for job in policy._table.jobs.values():
        assert job.own_blocks == job.held_blocks and not policy._hosting.is_guest(job)


@settings(max_examples=80, deadline=None)
@given(jobs=jobs_of, policy_settings=settings_of, guesses=guesses_of, blocks=st.integers(24, 60))
def test_own_blocks_are_those_held(
    jobs: Jobs, policy_settings: PolicySettings, guesses: list[int | None], blocks: int
) -> None:
    bench = rig(EcoServeProfile, policy_settings, blocks=blocks)
    bench.predict = in_turn(guesses)
    bench.on_batch = lambda batch: check_nothing_set_aside(bench)
    play(bench, jobs)
