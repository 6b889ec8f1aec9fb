"""`sync_coupled`: equal lengths start together."""

from services.scheduler.policy.contract import PolicySettings
from services.scheduler.policy.research.sync_coupled import SyncCoupledPolicy
from tests.services.scheduler.policy.batch_rig import BatchRig, rig


def bench_of(blocks: int, token_budget: int = 64, max_batch: int = 16) -> BatchRig:
    settings = PolicySettings(
        token_budget=token_budget,
        max_steps=1,
        max_batch_sequences=max_batch,
        options={"group_tokens": 8},
    )
    return rig(SyncCoupledPolicy, settings, blocks=blocks, lag=0)


def test_a_group_goes_before_those_that_came_between_its_members() -> None:
    bench = bench_of(64)
    for name, length in (("a", 16), ("b", 40), ("c", 14), ("d", 38), ("e", 13)):
        bench.arrive(name, 4, length, 40, length)
    bench.finish()
    assert [key[0] for key in bench.started] == ["a", "c", "e", "b", "d"]


def test_a_group_that_does_not_fit_is_split_and_nobody_else_slips_in() -> None:
    bench = bench_of(11)
    for name, length in (("a", 16), ("b", 16), ("c", 16), ("d", 3)):
        bench.arrive(name, 4, length, 40, length)
    bench.turn()
    assert [item.key[0] for item in bench.batches[0].prefills] == ["a", "b"], "5 + 5 of 11 blocks"
    bench.finish()
    assert [key[0] for key in bench.started] == ["a", "b", "c", "d"]


def test_members_that_the_budget_kept_back_start_before_another_group() -> None:
    bench = bench_of(64, token_budget=16)
    bench.arrive("a", 12, 16, 40, 16)
    bench.arrive("b", 12, 15, 40, 15)
    bench.arrive("c", 12, 14, 40, 14)
    bench.turn()
    bench.arrive("d", 2, 3, 40, 3)
    bench.finish()
    assert [key[0] for key in bench.started] == ["a", "b", "c", "d"]


def test_members_that_started_together_end_together() -> None:
    bench = bench_of(64)
    jobs = [bench.arrive(name, 4, 12, 40, 12) for name in "abcd"]
    while not jobs[0].over:
        bench.turn()
    assert all(job.over for job in jobs)


def test_a_full_batch_leaves_the_rest_of_the_group_waiting() -> None:
    bench = bench_of(64, max_batch=2)
    for name in "abcde":
        bench.arrive(name, 4, 6, 40, 6)
    bench.finish()
    assert max(len(batch.prefills) + len(batch.decodes) for batch in bench.batches) == 2
